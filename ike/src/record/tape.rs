// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The border between the endpoint and what must not be in a recording.
//!
//! Everything that depends on a secret, or on chance, passes through a [`Tape`]: random octets,
//! what a payload holds once it is opened, what it looks like once it is sealed, whether a
//! pre-shared key fits. A recording tape notes what came out, never what went in; a replaying tape
//! gives that back without computing anything, so that a replay needs no secret.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde::{Deserialize, Serialize};

use crate::crypto::CryptoError;

/// Something that came over the border.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Draw {
    /// Random octets that are, or decide, something that others can see.
    Random(#[serde(with = "swanherd_ipsec::hex")] Vec<u8>),
    /// Random octets that are a secret: noted, not kept.
    Secret,
    /// A payload that was sealed.
    Sealed {
        /// The inner payloads, or the part of them that is in this fragment.
        #[serde(with = "swanherd_ipsec::hex")]
        plain: Vec<u8>,
        /// Vector, ciphertext and check value.
        #[serde(with = "swanherd_ipsec::hex")]
        sealed: Vec<u8>,
    },
    /// A payload could not be sealed.
    NotSealed(CryptoError),
    /// A payload that was opened: the inner payloads.
    Opened(#[serde(with = "swanherd_ipsec::hex")] Vec<u8>),
    /// A payload could not be opened.
    NotOpened(CryptoError),
    /// AUTH data made with a pre-shared key.
    Auth(#[serde(with = "swanherd_ipsec::hex")] Vec<u8>),
    /// Whether AUTH data of the peer's was right.
    AuthIsRight(bool),
    /// A cookie.
    Cookie(#[serde(with = "swanherd_ipsec::hex")] Vec<u8>),
    /// Whether a cookie was one of ours.
    CookieIsRight(bool),
}

/// See the module's text. Clones share one tape; the default is none, which costs nothing.
#[derive(Clone, Debug, Default)]
pub(crate) struct Tape(Option<Arc<Mutex<Reel>>>);

#[derive(Debug)]
enum Reel {
    Recording {
        draws: Vec<Draw>,
        /// Inside of a draw that is noted as a whole.
        within: bool,
    },
    Replaying {
        draws: VecDeque<Draw>,
        fault: Option<String>,
    },
}

impl Tape {
    /// A tape that notes.
    pub(crate) fn recording() -> Self {
        Self::of(Reel::Recording {
            draws: Vec::new(),
            within: false,
        })
    }

    /// A tape that gives back.
    pub(crate) fn replaying() -> Self {
        Self::of(Reel::Replaying {
            draws: VecDeque::new(),
            fault: None,
        })
    }

    /// What was noted since the last time.
    pub(crate) fn take(&self) -> Vec<Draw> {
        match self.reel().as_deref_mut() {
            Some(Reel::Recording { draws, .. }) => std::mem::take(draws),
            _ => Vec::new(),
        }
    }

    /// What to give back during the next input.
    pub(crate) fn give(&self, given: Vec<Draw>) {
        if let Some(Reel::Replaying { draws, .. }) = self.reel().as_deref_mut() {
            draws.extend(given);
        }
    }

    /// Ends an input: everything must have been asked for, and nothing else.
    pub(crate) fn finish(&self) -> Result<(), String> {
        let mut reel = self.reel();
        let Some(Reel::Replaying { draws, fault }) = reel.as_deref_mut() else {
            return Ok(());
        };
        if let Some(fault) = fault.take() {
            return Err(fault);
        }
        match draws.pop_front() {
            Some(left) => Err(format!("{} was not asked for", left.name())),
            None => Ok(()),
        }
    }

    /// Octets that others may see.
    pub(crate) fn random(&self, out: &mut [u8], live: impl FnOnce(&mut [u8])) {
        if self.0.is_none() {
            return live(out);
        }
        let len = out.len();
        let drawn = self.draw(
            || {
                let mut octets = vec![0; len];
                live(&mut octets);
                octets
            },
            |octets| Draw::Random(octets.clone()),
            |draw| match draw {
                Draw::Random(octets) if octets.len() == len => Ok(octets),
                other => Err(other.mismatch("random octets")),
            },
        );
        out.copy_from_slice(&drawn);
    }

    /// Octets that nobody may see: all the same in a replay.
    pub(crate) fn secret(&self, live: impl FnOnce() -> [u8; 32]) -> [u8; 32] {
        self.draw(
            live,
            |_| Draw::Secret,
            |draw| match draw {
                Draw::Secret => Ok([0; 32]),
                other => Err(other.mismatch("a secret")),
            },
        )
    }

    /// Seals.
    pub(crate) fn seal(
        &self,
        plain: Vec<u8>,
        live: impl FnOnce(Vec<u8>) -> Result<Vec<u8>, CryptoError>,
    ) -> Result<Vec<u8>, CryptoError> {
        if self.0.is_none() {
            return live(plain);
        }
        let shown = plain.clone();
        self.draw(
            || live(plain),
            |result| match result {
                Ok(sealed) => Draw::Sealed {
                    plain: shown.clone(),
                    sealed: sealed.clone(),
                },
                Err(error) => Draw::NotSealed(error.clone()),
            },
            |draw| match draw {
                Draw::Sealed { plain, sealed } if plain == shown => Ok(Ok(sealed)),
                Draw::Sealed { plain, .. } => Err(format!(
                    "inner payloads were {} and are {}",
                    swanherd_ipsec::hex::encode(&plain),
                    swanherd_ipsec::hex::encode(&shown)
                )),
                Draw::NotSealed(error) => Ok(Err(error)),
                other => Err(other.mismatch("a sealed payload")),
            },
        )
    }

    /// Opens.
    pub(crate) fn open(
        &self,
        live: impl FnOnce() -> Result<Vec<u8>, CryptoError>,
    ) -> Result<Vec<u8>, CryptoError> {
        self.draw(
            live,
            |result| match result {
                Ok(plain) => Draw::Opened(plain.clone()),
                Err(error) => Draw::NotOpened(error.clone()),
            },
            |draw| match draw {
                Draw::Opened(plain) => Ok(Ok(plain)),
                Draw::NotOpened(error) => Ok(Err(error)),
                other => Err(other.mismatch("an opened payload")),
            },
        )
    }

    /// Makes AUTH data with a pre-shared key.
    pub(crate) fn auth(&self, live: impl FnOnce() -> Vec<u8>) -> Vec<u8> {
        self.draw(
            live,
            |auth| Draw::Auth(auth.clone()),
            |draw| match draw {
                Draw::Auth(auth) => Ok(auth),
                other => Err(other.mismatch("AUTH data")),
            },
        )
    }

    /// Verifies AUTH data with a pre-shared key.
    pub(crate) fn auth_is_right(&self, live: impl FnOnce() -> bool) -> bool {
        self.draw(
            live,
            |right| Draw::AuthIsRight(*right),
            |draw| match draw {
                Draw::AuthIsRight(right) => Ok(right),
                other => Err(other.mismatch("whether AUTH data is right")),
            },
        )
    }

    /// Makes a cookie.
    pub(crate) fn cookie(&self, live: impl FnOnce() -> Vec<u8>) -> Vec<u8> {
        self.draw(
            live,
            |cookie| Draw::Cookie(cookie.clone()),
            |draw| match draw {
                Draw::Cookie(cookie) => Ok(cookie),
                other => Err(other.mismatch("a cookie")),
            },
        )
    }

    /// Verifies a cookie.
    pub(crate) fn cookie_is_right(&self, live: impl FnOnce() -> bool) -> bool {
        self.draw(
            live,
            |right| Draw::CookieIsRight(*right),
            |draw| match draw {
                Draw::CookieIsRight(right) => Ok(right),
                other => Err(other.mismatch("whether a cookie is right")),
            },
        )
    }

    /// Computes, notes or gives back. A replay that has gone astray computes, too, so that the
    /// endpoint comes to an end of what it does; its result is not looked at any more.
    fn draw<T>(
        &self,
        live: impl FnOnce() -> T,
        note: impl FnOnce(&T) -> Draw,
        again: impl FnOnce(Draw) -> Result<T, String>,
    ) -> T {
        let outermost = match self.reel().as_deref_mut() {
            None => false,
            Some(Reel::Recording { within, .. }) => !std::mem::replace(within, true),
            Some(Reel::Replaying { draws, fault }) => {
                let given = draws
                    .pop_front()
                    .ok_or_else(|| "more is asked for than was".to_owned());
                match given.and_then(again) {
                    Ok(result) => return result,
                    Err(reason) => {
                        fault.get_or_insert(reason);
                        draws.clear();
                    }
                }
                false
            }
        };
        let result = live();
        if outermost && let Some(Reel::Recording { draws, within }) = self.reel().as_deref_mut() {
            draws.push(note(&result));
            *within = false;
        }
        result
    }

    fn of(reel: Reel) -> Self {
        Self(Some(Arc::new(Mutex::new(reel))))
    }

    fn reel(&self) -> Option<MutexGuard<'_, Reel>> {
        let reel = self.0.as_ref()?;
        Some(reel.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Draw {
    fn name(&self) -> &'static str {
        match self {
            Self::Random(_) => "random octets",
            Self::Secret => "a secret",
            Self::Sealed { .. } | Self::NotSealed(_) => "a sealed payload",
            Self::Opened(_) | Self::NotOpened(_) => "an opened payload",
            Self::Auth(_) => "AUTH data",
            Self::AuthIsRight(_) => "whether AUTH data is right",
            Self::Cookie(_) => "a cookie",
            Self::CookieIsRight(_) => "whether a cookie is right",
        }
    }

    fn mismatch(&self, wanted: &str) -> String {
        format!("{wanted} is asked for, {} was", self.name())
    }
}
