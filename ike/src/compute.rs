// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Expensive computations as values, so that no shard of the daemon ever waits for one.
//!
//! An endpoint emits a [`Job`]; the shell runs it on any thread with [`Job::run`] and hands the
//! [`Computed`] back. A test runs it in place.

use std::sync::Arc;

use swanherd_ipsec::Secret;

use crate::credentials::{PeerAuth, PeerAuthError, PrivateKey, VerifiedPeer};
use crate::crypto::auth::{SignatureError, SigningPlan};
use crate::crypto::{CryptoError, KeyExchange, KeyPair, Rng};
use crate::wire::AuthMethod;

/// A self-contained computation.
#[cfg_attr(test, derive(Clone))]
pub enum Job {
    /// Makes a private value for a key exchange that we start. Yields [`Computed::Generated`].
    Generate {
        /// Method.
        method: &'static dyn KeyExchange,
        /// From [`Rng::seed`].
        seed: [u8; 32],
    },
    /// Finishes a key exchange that we started. Yields [`Computed::Agreed`].
    Agree {
        /// Our private value.
        pair: KeyPair,
        /// The peer's Key Exchange Data.
        peer: Vec<u8>,
    },
    /// Both halves of a key exchange that the peer started. Yields [`Computed::Responded`].
    Respond {
        /// Method.
        method: &'static dyn KeyExchange,
        /// From [`Rng::seed`].
        seed: [u8; 32],
        /// The peer's Key Exchange Data.
        peer: Vec<u8>,
    },
    /// Signs our AUTH. Yields [`Computed::Signed`].
    Sign {
        /// Our key.
        key: Arc<PrivateKey>,
        /// From [`SigningPlan::choose`].
        plan: SigningPlan,
        /// From [`crate::crypto::auth::signed_octets`].
        octets: Vec<u8>,
    },
    /// Verifies the peer's certificate path and signature. Yields [`Computed::Verified`].
    Verify(Box<PeerAuth>),
}

/// The result of a [`Job`].
#[derive(Debug)]
pub enum Computed {
    /// Our private value.
    Generated(Result<KeyPair, CryptoError>),
    /// g^ir.
    Agreed(Result<Secret, CryptoError>),
    /// Our Key Exchange Data, and g^ir.
    Responded(Result<(Vec<u8>, Secret), CryptoError>),
    /// Method and data of our AUTH payload.
    Signed(Result<(AuthMethod, Vec<u8>), SignatureError>),
    /// Who the peer has proven to be.
    Verified(Result<Box<VerifiedPeer>, PeerAuthError>),
}

impl Job {
    /// Computes.
    pub fn run(self) -> Computed {
        match self {
            Self::Generate { method, seed } => {
                Computed::Generated(method.generate(&mut Rng::new(seed)))
            }
            Self::Agree { pair, peer } => Computed::Agreed(pair.agree(&peer)),
            Self::Respond { method, seed, peer } => {
                Computed::Responded(respond(method, seed, &peer))
            }
            Self::Sign { key, plan, octets } => {
                let signature = plan.sign(&key, &octets);
                Computed::Signed(signature.map(|data| (plan.method, data)))
            }
            Self::Verify(auth) => Computed::Verified(auth.verify().map(Box::new)),
        }
    }
}

impl core::fmt::Debug for Job {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self {
            Self::Generate { method, .. } => write!(f, "Generate({})", method.id()),
            Self::Agree { pair, .. } => write!(f, "Agree({})", pair.id()),
            Self::Respond { method, .. } => write!(f, "Respond({})", method.id()),
            Self::Sign { plan, .. } => write!(f, "Sign({})", plan.scheme.name()),
            Self::Verify(auth) => write!(f, "Verify({})", auth.method),
        }
    }
}

fn respond(
    method: &'static dyn KeyExchange,
    seed: [u8; 32],
    peer: &[u8],
) -> Result<(Vec<u8>, Secret), CryptoError> {
    let pair = method.generate(&mut Rng::new(seed))?;
    let public = pair.public().to_vec();
    let shared = pair.agree(peer)?;
    Ok((public, shared))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::crypto::Provider;

    #[test]
    fn a_key_exchange_runs_through_jobs() {
        fn assert_send<T: Send>(value: T) -> T {
            value
        }
        for provider in [Provider::ring(), Provider::fake()] {
            for &method in provider.key_exchanges {
                let job = assert_send(Job::Generate {
                    method,
                    seed: [1; 32],
                });
                let Computed::Generated(Ok(pair)) = assert_send(job.run()) else {
                    panic!("{method:?} did not generate");
                };
                let respond = Job::Respond {
                    method,
                    seed: [2; 32],
                    peer: pair.public().to_vec(),
                };
                let Computed::Responded(Ok((public, theirs))) = respond.run() else {
                    panic!("{method:?} did not respond");
                };
                let Computed::Agreed(Ok(ours)) = (Job::Agree { pair, peer: public }).run() else {
                    panic!("{method:?} did not agree");
                };

                assert_eq!(ours, theirs, "{method:?}");
            }
        }
    }

    #[test]
    fn debug_output_names_the_method_only() {
        let job = Job::Generate {
            method: Provider::ring().key_exchanges[0],
            seed: [1; 32],
        };

        assert_eq!(format!("{job:?}"), "Generate(CURVE_25519)");
    }
}
