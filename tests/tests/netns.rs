// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Against strongSwan on the bare host: both daemons encrypt in user space.

mod interop;

interop::suite!(swanherd_tests::Plane::User);

// The same to every plane: once is enough.
interop::cases! { swanherd_tests::Plane::User;
    ecdsa_cbc_p256_as_initiator = establishes(Suite::CBC_P256, Auth::Ecdsa, Left);
    ecdsa_cbc_p256_as_responder = establishes(Suite::CBC_P256, Auth::Ecdsa, Right);
    rsa_gcm_x25519_as_initiator = establishes(Suite::GCM_X25519, Auth::Rsa, Left);
    rsa_cbc_modp2048_as_responder = establishes(Suite::CBC_MODP2048, Auth::Rsa, Right);
    ed25519_gcm_x25519_as_initiator = establishes(Suite::GCM_X25519, Auth::Ed25519, Left);
    ed25519_gcm_x25519_as_responder = establishes(Suite::GCM_X25519, Auth::Ed25519, Right);
}
