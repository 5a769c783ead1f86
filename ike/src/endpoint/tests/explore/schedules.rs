// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Schedules that once ended badly.

use super::follow;

#[test]
fn two_rekeys_that_cross_end_with_one_child() {
    assert_eq!(follow("child-child: c0 c1 dB0 dA0 dA0 dB0"), Ok(()));
}

#[test]
fn the_loser_of_a_collision_goes_back_to_the_old_child_before_it_deletes_its_own() {
    assert_eq!(follow("child-child: c0 c1 dA0 dB0 dA0 dB0 dB0"), Ok(()));
}

#[test]
fn a_redundant_child_is_deleted_only_once_its_data_plane_sends_by_another() {
    // Alice's data plane has not left the redundant child: her delete cannot arrive yet.
    let schedule = "child-child-slow: \
        c0 pA dB0 c1 pB pB dA0 pA pA dB0 pB dA0 pA pA pA dB0 pB pB pB";
    let early = Err("after 16 steps: dB0 is not possible".to_owned());
    assert_eq!(follow(schedule), early);
    let (scheduled, _) = schedule.rsplit_once(" dB0").expect("it has one");
    assert_eq!(follow(scheduled), Ok(()));
}

#[test]
fn a_child_that_the_peer_deletes_while_it_is_installed_is_undone() {
    assert_eq!(
        follow("rekey-against-delete-of-child-slow: c0 pA dB0 pB c1"),
        Ok(())
    );
}

#[test]
fn a_child_that_is_being_answered_about_is_deleted_once_it_is_there() {
    assert_eq!(
        follow("rekey-against-delete-of-child-slow: c0 pA dB0 c1"),
        Ok(())
    );
}

#[test]
fn a_second_child_of_a_kind_is_used_only_once_the_peer_has_it() {
    assert_eq!(follow("both-make-the-same-child: c0 c1 dB0 dA1"), Ok(()));
}

#[test]
fn a_child_made_anew_is_used_only_once_the_peer_has_it() {
    let schedule = "own-rekey-cannot-be-installed: c0 c1 dA0 dB0 dB0 c2 dA1 xB0";
    assert_eq!(follow(schedule), Ok(()));
}
