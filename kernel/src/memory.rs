// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Memory of this process.
#![allow(unsafe_code)]

/// Has the allocator return to the system what has been freed, but is kept between what is still in
/// use. glibc does so only at the end of its heap by itself; other allocators are left alone.
pub fn give_back() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: takes no pointers and may be called at any time from any thread.
    unsafe {
        libc::malloc_trim(0);
    }
}
