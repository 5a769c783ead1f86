// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Against strongSwan on the bare host: both daemons encrypt in user space.

mod interop;

interop::suite!(swanherd_tests::Plane::User);
