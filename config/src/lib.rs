// SPDX-License-Identifier: Apache-2.0 OR MIT
//! swanctl.conf, strongswan.conf and VICI trees as typed, validated definitions.

#![forbid(unsafe_code)]

pub mod identity;
pub mod model;
