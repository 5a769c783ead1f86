// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What every data plane must do, stated once and asked of each of them.
//!
//! The subject is a host with a plane, the other host is a script: it makes ESP packets by hand,
//! with a cipher that hides nothing, and looks at all that the subject sends. What the kernel's
//! plane does is what is right; `conformance_xfrm` shows that it is so, `conformance_tun` that the
//! plane in user space does the same.
//!
//! All ESP is in UDP, which both planes can do.
#![allow(clippy::unwrap_used, reason = "a failed step fails the test")]

pub(crate) mod acquires;
pub(crate) mod bench;
pub(crate) mod counters;
pub(crate) mod inbound;
pub(crate) mod lifecycle;
pub(crate) mod limits;
pub(crate) mod packet;
pub(crate) mod policies;
pub(crate) mod sniffer;
pub(crate) mod traffic;

/// Makes a test of each behaviour, for the plane of `$bed`.
macro_rules! conformance {
    ($bed:ty) => {
        conformance! {
            $bed;
            acquires::an_sa_ends_the_acquires_and_its_end_begins_them_again;
            acquires::many_packets_of_many_flows_raise_one_acquire;
            acquires::policies_of_one_request_id_share_an_acquire;
            acquires::what_a_narrower_child_leaves_to_its_trap_is_asked_for_at_once;
            counters::octets_are_those_of_inner_packets;
            counters::padding_is_not_counted;
            counters::use_is_remembered;
            inbound::a_window_lets_late_packets_pass_once;
            inbound::a_window_of_none_lets_everything_pass;
            inbound::an_sa_belongs_to_one_address;
            inbound::damage_is_dropped_and_only_forgery_counted;
            inbound::extended_sequence_numbers_have_a_window;
            inbound::packets_of_a_new_address_are_reported_once;
            inbound::the_first_packets_pass_once_whatever_the_window;
            inbound::traffic_classes_come_in_as_the_sa_says;
            inbound::what_came_by_an_sa_must_fit_its_policies;
            lifecycle::a_moved_sa_keeps_its_numbers_and_counters;
            lifecycle::a_second_sa_of_one_name_is_refused;
            lifecycle::batches_answer_each_operation;
            lifecycle::nothing_is_left_after_the_end;
            lifecycle::removing_what_is_not_there_succeeds;
            lifecycle::spis_are_reserved_and_released;
            lifecycle::the_newest_sa_sends_until_it_goes;
            lifecycle::what_is_listed_is_what_was_asked_for;
            limits::limits_in_octets_count_what_was_before;
            limits::limits_in_packets_rekey_once_and_then_end_the_sa;
            limits::limits_in_time_need_no_traffic;
            limits::one_soft_expiry_whatever_limit_comes_first;
            policies::a_policy_bound_to_an_spi_sends_through_no_other_sa;
            policies::a_policy_without_sa_lets_nothing_out;
            policies::bypass_and_discard_go_by_priority;
            policies::conflicting_policies_are_refused;
            policies::equal_priorities_go_by_age;
            policies::narrower_selectors_win;
            policies::protocol_and_ports_select;
            policies::shunts_of_one_port_leave_the_rest_alone;
            policies::templates_name_the_peer_of_their_sas;
            policies::what_no_policy_selects_goes_in_clear;
            traffic::bursts_pass_both_ways;
            traffic::every_suite_carries_traffic_both_ways;
            traffic::large_datagrams_pass_whole;
            traffic::the_first_packets_after_a_set_up_pass;
            traffic::traffic_classes_go_out_as_the_sa_says;
        }
    };
    ($bed:ty; $($module:ident::$name:ident;)*) => {
        $(
            #[test]
            fn $name() {
                if <$bed as conformance::bench::Bed>::is_available() {
                    common::block_on(conformance::$module::$name::<$bed>());
                }
            }
        )*
    };
}
