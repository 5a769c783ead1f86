// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Authentication of both sides (RFC 7296 section 2.15, RFC 7427).

use std::sync::Arc;

use swanherd_config::model::{
    AuthMethod as Configured, AuthRound, Connection, SendCert, SharedKind,
};
use swanherd_ipsec::{Identity, Secret};

use super::IkeSa;
use super::env::Env;
use crate::api::{FailureReason, LogGroup, Now};
use crate::compute::Job;
use crate::credentials::PeerAuth;
use crate::crypto::Prf;
use crate::crypto::auth::{SigningPlan, shared_key, signed_octets, verify_shared_key};
use crate::wire::{AuthMethod, AuthPayload, CertEncoding, CertPayload, CertReqPayload, Payload};

/// The messages of IKE_SA_INIT, which both sides authenticate.
#[derive(Clone, Debug, Default)]
pub(crate) struct Transcript {
    /// The request that was answered.
    pub(crate) request: Vec<u8>,
    /// The response.
    pub(crate) response: Vec<u8>,
    /// Initiator's nonce.
    pub(crate) nonce_i: Vec<u8>,
    /// Responder's nonce.
    pub(crate) nonce_r: Vec<u8>,
}

/// This side's proof.
pub(crate) enum LocalAuth {
    /// At hand.
    Ready(AuthPayload),
    /// A signature that is to be computed.
    Sign {
        /// The computation.
        job: Job,
        /// CERT payloads to go with it.
        certs: Vec<Payload>,
    },
}

/// The peer's proof.
pub(crate) enum PeerCheck {
    /// It is right.
    Accepted,
    /// A signature that is to be verified.
    Verify(Job),
}

/// Why an authentication cannot be.
pub(crate) type AuthFailure = (FailureReason, String);

/// The first local round. The configuration guarantees that there is one.
pub(crate) fn local_round(conn: &Connection) -> Option<&AuthRound> {
    conn.local.first()
}

/// The first remote round.
pub(crate) fn remote_round(conn: &Connection) -> Option<&AuthRound> {
    conn.remote.first()
}

/// Why a connection cannot be authenticated by this build, if so.
pub(crate) fn unsupported(conn: &Connection) -> Option<String> {
    if conn.local.len() > 1 || conn.remote.len() > 1 {
        return Some("more than one authentication round is not supported".to_owned());
    }
    if conn.ppk_required {
        return Some("post-quantum pre-shared keys (ppk_required) are not supported".to_owned());
    }
    for (side, round) in [
        ("local", conn.local.first()),
        ("remote", conn.remote.first()),
    ] {
        if let Some(AuthRound {
            auth: Configured::Eap(method),
            ..
        }) = round
        {
            return Some(format!(
                "{side} authentication by {method} is not supported"
            ));
        }
    }
    None
}

impl IkeSa {
    /// The identity that this side takes for a connection.
    pub(crate) fn default_local_id(&self, env: &Env, conn: &Connection) -> Identity {
        let Some(round) = local_round(conn) else {
            return Identity::from_ip(self.local.ip());
        };
        round
            .id
            .as_ref()
            .and_then(|pattern| pattern.identity())
            .or_else(|| match round.auth {
                Configured::Pubkey(_) | Configured::Any => env.credentials.default_identity(round),
                _ => None,
            })
            .unwrap_or_else(|| Identity::from_ip(self.local.ip()))
    }

    fn octets(
        &self,
        transcript: &Transcript,
        of_initiator: bool,
        id: &Identity,
    ) -> Option<Vec<u8>> {
        let (suite, keys) = (self.suite?, self.keys.as_ref()?);
        let prf = Prf::new(suite.prf).ok()?;
        let body = crate::wire::id::body(id);
        let (message, nonce, key) = if of_initiator {
            (&transcript.request, &transcript.nonce_r, &keys.pi)
        } else {
            (&transcript.response, &transcript.nonce_i, &keys.pr)
        };
        Some(signed_octets(prf, message, nonce, key, &body))
    }

    fn psk(&self, env: &mut Env) -> Option<Secret> {
        let by_address = Identity::from_ip(self.remote.ip());
        let remote = if self.remote_id.is_any() {
            &by_address
        } else {
            &self.remote_id
        };
        let credentials = Arc::clone(&env.credentials);
        let found = credentials.shared_secret(SharedKind::Ike, &self.local_id, remote)?;
        if found.candidates > 1 {
            self.log(
                env,
                LogGroup::Cfg,
                0,
                format!(
                    "{} different secrets fit {} equally well, the first is taken: give them \
                     owners",
                    found.candidates,
                    self.peer_text()
                ),
            );
        }
        Some(found.secret.secret.clone())
    }

    /// Makes this side's proof. `requested` are the authorities that the peer asked for, `None` if
    /// it did not ask.
    pub(crate) fn local_auth(
        &self,
        env: &mut Env,
        conn: &Connection,
        transcript: &Transcript,
        requested: Option<&[[u8; 20]]>,
    ) -> Result<LocalAuth, AuthFailure> {
        let missing = |text: String| (FailureReason::MissingCredentials, text);
        let round = local_round(conn)
            .ok_or_else(|| missing("no local authentication is configured".to_owned()))?;
        let octets = self
            .octets(transcript, self.initiator, &self.local_id)
            .ok_or_else(|| missing("the IKE SA has no keys".to_owned()))?;
        let constraints = match &round.auth {
            Configured::Psk => return self.local_psk(env, &octets),
            Configured::Eap(method) => {
                return Err((
                    FailureReason::Unsupported,
                    format!("authentication by {method} is not supported"),
                ));
            }
            Configured::Pubkey(constraints) => constraints.clone(),
            Configured::Any => Default::default(),
        };
        let credential = env
            .credentials
            .local(round, &self.local_id, requested.unwrap_or_default())
            .map_err(|error| missing(error.to_string()))?;
        let plan = SigningPlan::choose(credential.key.public(), &self.peer.hashes, &constraints)
            .map_err(|error| (FailureReason::Unsupported, error.to_string()))?;
        let send = match conn.send_cert {
            SendCert::Always => true,
            SendCert::IfAsked => requested.is_some(),
            SendCert::Never => false,
        };
        let certs = credential
            .certificate
            .iter()
            .chain(&credential.chain)
            .filter(|_| send)
            .map(|certificate| {
                Payload::Cert(CertPayload {
                    encoding: CertEncoding::X509Signature,
                    data: certificate.der().to_vec(),
                })
            })
            .collect();
        Ok(LocalAuth::Sign {
            job: Job::Sign {
                key: credential.key,
                plan,
                octets,
            },
            certs,
        })
    }

    fn local_psk(&self, env: &mut Env, octets: &[u8]) -> Result<LocalAuth, AuthFailure> {
        let missing = || {
            (
                FailureReason::MissingCredentials,
                format!("no pre-shared key is loaded for {}", self.peer_text()),
            )
        };
        let psk = self.psk(env).ok_or_else(missing)?;
        let prf = self.prf().ok_or_else(missing)?;
        Ok(LocalAuth::Ready(AuthPayload {
            method: AuthMethod::SharedKey,
            data: env.rng.tape().auth(|| shared_key(prf, &psk, octets)),
        }))
    }

    fn prf(&self) -> Option<Prf> {
        Prf::new(self.suite?.prf).ok()
    }

    /// Examines the peer's proof against a connection's remote round.
    pub(crate) fn peer_auth(
        &self,
        env: &mut Env,
        now: Now,
        conn: &Connection,
        transcript: &Transcript,
        auth: &AuthPayload,
        payloads: &[Payload],
    ) -> Result<PeerCheck, AuthFailure> {
        let failed = |text: String| (FailureReason::PeerAuthFailed, text);
        let round = remote_round(conn)
            .ok_or_else(|| failed("no remote authentication is configured".to_owned()))?;
        if let Some(pattern) = &round.id
            && pattern.matches(&self.remote_id).is_none()
        {
            return Err(failed(format!(
                "the peer calls itself {}, but {pattern} is expected",
                swanherd_config::identity::display_identity(&self.remote_id)
            )));
        }
        let octets = self
            .octets(transcript, !self.initiator, &self.remote_id)
            .ok_or_else(|| failed("the IKE SA has no keys".to_owned()))?;
        let shared = auth.method == AuthMethod::SharedKey;
        match (&round.auth, shared) {
            (Configured::Psk | Configured::Any, true) => {
                let psk = self.psk(env).ok_or_else(|| {
                    (
                        FailureReason::MissingCredentials,
                        format!("no pre-shared key is loaded for {}", self.peer_text()),
                    )
                })?;
                let prf = self
                    .prf()
                    .ok_or_else(|| failed("the IKE SA has no PRF".to_owned()))?;
                let right = env
                    .rng
                    .tape()
                    .auth_is_right(|| verify_shared_key(prf, &psk, &octets, &auth.data));
                if right {
                    Ok(PeerCheck::Accepted)
                } else {
                    Err(failed(
                        "the peer's pre-shared key is not the same as ours".to_owned(),
                    ))
                }
            }
            (Configured::Pubkey(_) | Configured::Any, false) => {
                let certificates = payloads
                    .iter()
                    .filter_map(|payload| match payload {
                        Payload::Cert(cert) if cert.encoding == CertEncoding::X509Signature => {
                            Some(cert.data.clone())
                        }
                        _ => None,
                    })
                    .collect();
                Ok(PeerCheck::Verify(Job::Verify(Box::new(PeerAuth {
                    credentials: Arc::clone(&env.credentials),
                    round: round.clone(),
                    identity: self.remote_id.clone(),
                    certificates,
                    method: auth.method,
                    auth: auth.data.clone(),
                    octets,
                    unix: now.unix,
                }))))
            }
            (Configured::Eap(method), _) => Err((
                FailureReason::Unsupported,
                format!("peer authentication by {method} is not supported"),
            )),
            _ => Err(failed(format!(
                "the peer authenticates by {}, which the configuration does not allow",
                auth.method
            ))),
        }
    }
}

/// The authorities of all CERTREQ payloads for X.509; `None` if there is none.
pub(crate) fn requested_authorities(payloads: &[Payload]) -> Option<Vec<[u8; 20]>> {
    let mut found = None;
    for payload in payloads {
        if let Payload::CertReq(request) = payload
            && request.encoding == CertEncoding::X509Signature
        {
            found
                .get_or_insert_with(Vec::new)
                .extend(request.key_hashes().copied());
        }
    }
    found
}

/// The CERTREQ payload for a connection, unless none is wanted or nothing could be asked for.
pub(crate) fn certificate_request(env: &Env, conn: Option<&Connection>) -> Option<Payload> {
    if conn.is_some_and(|conn| !conn.send_certreq) {
        return None;
    }
    let round = conn.and_then(remote_round);
    if round.is_some_and(|round| matches!(round.auth, Configured::Psk | Configured::Eap(_))) {
        return None;
    }
    let authorities = env.credentials.certificate_requests(round);
    (!authorities.is_empty()).then(|| {
        Payload::CertReq(CertReqPayload {
            encoding: CertEncoding::X509Signature,
            authorities: authorities.concat(),
        })
    })
}
