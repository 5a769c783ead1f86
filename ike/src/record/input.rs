// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Inputs as a recording holds them: all of them, without their secrets.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use swanherd_config::identity::IdentityPattern;
use swanherd_config::model::{Connection, SharedKind, SharedSecret};
use swanherd_ipsec::plane::PlaneEvent;
use swanherd_ipsec::registry::KeyExchangeId;
use swanherd_ipsec::{Secret, hex};

use crate::api::{
    Command, CommandId, Computed, Datagram, HostAddress, Input, PlaneAnswer, Settings, Token,
    Transmit,
};
use crate::credentials::{
    Certificate, Credentials, PeerAuthError, PrivateKey, PublicKey, VerifiedPeer,
};
use crate::crypto::auth::{SignatureError, SignatureScheme};
use crate::crypto::kex::PrivateValue;
use crate::crypto::{CryptoError, KeyPair};
use crate::wire::AuthMethod;

/// The longest shared secret of a key exchange that a recording may claim; of MODP-8192.
const LONGEST_SHARED: usize = 1024;

/// [`Input`].
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum InputRecord {
    Datagram {
        local: SocketAddr,
        remote: SocketAddr,
        #[serde(with = "hex")]
        payload: Vec<u8>,
    },
    Timeout {},
    Plane {
        token: Token,
        answer: PlaneAnswer,
    },
    Computed {
        token: Token,
        result: ComputedRecord,
    },
    Resolved {
        token: Token,
        addrs: Vec<IpAddr>,
    },
    Source {
        token: Token,
        addr: Option<IpAddr>,
    },
    Usage {
        token: Token,
        ago: Option<Duration>,
    },
    PlaneEvent(PlaneEvent),
    Addresses(Vec<HostAddress>),
    TooLong {
        local: SocketAddr,
        remote: SocketAddr,
        #[serde(with = "hex")]
        payload: Vec<u8>,
        dscp: u8,
    },
    Load(Box<Connection>),
    Unload {
        connection: String,
    },
    Credentials(CredentialsRecord),
    Settings(Box<Settings>),
    Command {
        id: CommandId,
        command: Command,
    },
    Cancel {
        id: CommandId,
    },
    Shutdown {},
}

impl InputRecord {
    pub(super) fn of(input: &Input) -> Self {
        match input {
            Input::Datagram(datagram) => Self::Datagram {
                local: datagram.local,
                remote: datagram.remote,
                payload: datagram.payload.clone(),
            },
            Input::Timeout => Self::Timeout {},
            Input::Plane(token, answer) => Self::Plane {
                token: *token,
                answer: answer.clone(),
            },
            Input::Computed(token, computed) => Self::Computed {
                token: *token,
                result: ComputedRecord::of(computed),
            },
            Input::Resolved(token, addrs) => Self::Resolved {
                token: *token,
                addrs: addrs.clone(),
            },
            Input::Source(token, addr) => Self::Source {
                token: *token,
                addr: *addr,
            },
            Input::Usage(token, ago) => Self::Usage {
                token: *token,
                ago: *ago,
            },
            Input::PlaneEvent(event) => Self::PlaneEvent(event.clone()),
            Input::Addresses(addresses) => Self::Addresses(addresses.clone()),
            Input::TooLong(transmit) => Self::TooLong {
                local: transmit.local,
                remote: transmit.remote,
                payload: transmit.payload.clone(),
                dscp: transmit.dscp,
            },
            Input::Load(connection) => Self::Load(Box::new((**connection).clone())),
            Input::Unload(connection) => Self::Unload {
                connection: connection.clone(),
            },
            Input::Credentials(credentials) => {
                Self::Credentials(CredentialsRecord::of(credentials))
            }
            Input::Settings(settings) => Self::Settings(settings.clone()),
            Input::Command(id, command) => Self::Command {
                id: *id,
                command: command.clone(),
            },
            Input::Cancel(id) => Self::Cancel { id: *id },
            Input::Shutdown => Self::Shutdown {},
        }
    }

    /// The input, with stand-ins for what is secret.
    pub(super) fn restore(self) -> Result<Input, String> {
        Ok(match self {
            Self::Datagram {
                local,
                remote,
                payload,
            } => Input::Datagram(Datagram {
                local,
                remote,
                payload,
            }),
            Self::Timeout {} => Input::Timeout,
            Self::Plane { token, answer } => Input::Plane(token, answer),
            Self::Computed { token, result } => Input::Computed(token, result.restore()?),
            Self::Resolved { token, addrs } => Input::Resolved(token, addrs),
            Self::Source { token, addr } => Input::Source(token, addr),
            Self::Usage { token, ago } => Input::Usage(token, ago),
            Self::PlaneEvent(event) => Input::PlaneEvent(event),
            Self::Addresses(addresses) => Input::Addresses(addresses),
            Self::TooLong {
                local,
                remote,
                payload,
                dscp,
            } => Input::TooLong(Transmit {
                local,
                remote,
                payload,
                dscp,
                keepalive: false,
            }),
            Self::Load(connection) => {
                if connection.local.is_empty() || connection.remote.is_empty() {
                    return Err(format!(
                        "connection {} has no authentication",
                        connection.name
                    ));
                }
                Input::Load(Arc::from(connection))
            }
            Self::Unload { connection } => Input::Unload(connection),
            Self::Credentials(credentials) => Input::Credentials(Arc::new(credentials.restore()?)),
            Self::Settings(settings) => Input::Settings(settings),
            Self::Command { id, command } => Input::Command(id, command),
            Self::Cancel { id } => Input::Cancel(id),
            Self::Shutdown {} => Input::Shutdown,
        })
    }
}

/// Octets as hexadecimal digits.
#[derive(Debug, Serialize, Deserialize)]
#[serde(transparent)]
pub(super) struct Octets(#[serde(with = "hex")] Vec<u8>);

/// [`Credentials`].
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct CredentialsRecord {
    shared: Vec<SharedRecord>,
    /// SubjectPublicKeyInfo of the private keys.
    keys: Vec<Octets>,
    /// DER.
    certificates: Vec<Octets>,
}

#[derive(Debug, Serialize, Deserialize)]
struct SharedRecord {
    id: Option<String>,
    kind: SharedKind,
    /// Equal secrets have equal numbers, for it matters whether there are several.
    number: u32,
    owners: Vec<IdentityPattern>,
}

impl CredentialsRecord {
    fn of(credentials: &Credentials) -> Self {
        let mut seen: Vec<&Secret> = Vec::new();
        let shared = credentials.shared().map(|shared| {
            let known = seen.iter().position(|known| **known == shared.secret);
            let number = known.unwrap_or_else(|| {
                seen.push(&shared.secret);
                seen.len() - 1
            });
            SharedRecord {
                id: shared.id.clone(),
                kind: shared.kind,
                number: u32::try_from(number).unwrap_or(u32::MAX),
                owners: shared.owners.clone(),
            }
        });
        Self {
            shared: shared.collect(),
            keys: credentials
                .keys()
                .map(|(_, key)| Octets(key.public().spki().to_vec()))
                .collect(),
            certificates: credentials
                .certificates()
                .iter()
                .map(|certificate| Octets(certificate.der().to_vec()))
                .collect(),
        }
    }

    fn restore(self) -> Result<Credentials, String> {
        let mut credentials = Credentials::new();
        for shared in self.shared {
            credentials.add_shared(SharedSecret {
                id: shared.id,
                kind: shared.kind,
                secret: Secret::copy_of(&shared.number.to_be_bytes()),
                owners: shared.owners,
            });
        }
        for spki in self.keys {
            let public = PublicKey::from_spki(&spki.0).map_err(|error| error.to_string())?;
            credentials.add_key(PrivateKey::stand_in(public));
        }
        for der in self.certificates {
            credentials.add_certificate(certificate(&der)?);
        }
        Ok(credentials)
    }
}

fn certificate(der: &Octets) -> Result<Certificate, String> {
    Certificate::parse(&der.0).map_err(|error| error.to_string())
}

/// [`Computed`].
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum ComputedRecord {
    Generated(Result<GeneratedRecord, CryptoError>),
    /// Length of the secret.
    Agreed(Result<usize, CryptoError>),
    Responded(Result<RespondedRecord, CryptoError>),
    Signed(Result<SignedRecord, String>),
    Verified(Result<Box<VerifiedRecord>, String>),
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) struct GeneratedRecord {
    method: KeyExchangeId,
    public: Octets,
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) struct RespondedRecord {
    public: Octets,
    /// Length of the secret.
    shared: usize,
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) struct SignedRecord {
    method: AuthMethod,
    auth: Octets,
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) struct VerifiedRecord {
    certificate: Option<Octets>,
    key: Octets,
    scheme: SignatureScheme,
    authorities: Vec<Octets>,
}

impl ComputedRecord {
    fn of(computed: &Computed) -> Self {
        match computed {
            Computed::Generated(result) => Self::Generated(match result {
                Ok(pair) => Ok(GeneratedRecord {
                    method: pair.id(),
                    public: Octets(pair.public().to_vec()),
                }),
                Err(error) => Err(error.clone()),
            }),
            Computed::Agreed(result) => Self::Agreed(match result {
                Ok(shared) => Ok(shared.len()),
                Err(error) => Err(error.clone()),
            }),
            Computed::Responded(result) => Self::Responded(match result {
                Ok((public, shared)) => Ok(RespondedRecord {
                    public: Octets(public.clone()),
                    shared: shared.len(),
                }),
                Err(error) => Err(error.clone()),
            }),
            Computed::Signed(result) => Self::Signed(match result {
                Ok((method, auth)) => Ok(SignedRecord {
                    method: *method,
                    auth: Octets(auth.clone()),
                }),
                Err(error) => Err(error.to_string()),
            }),
            Computed::Verified(result) => Self::Verified(match result {
                Ok(peer) => Ok(Box::new(VerifiedRecord::of(peer))),
                Err(error) => Err(error.to_string()),
            }),
        }
    }

    fn restore(self) -> Result<Computed, String> {
        let shared = |len: usize| {
            if len > LONGEST_SHARED {
                return Err(format!("a secret of {len} octets is too long"));
            }
            Ok(Secret::new(vec![0; len]))
        };
        Ok(match self {
            Self::Generated(result) => Computed::Generated(
                result.map(|pair| KeyPair::new(pair.method, pair.public.0, Box::new(NotHere))),
            ),
            Self::Agreed(Ok(len)) => Computed::Agreed(Ok(shared(len)?)),
            Self::Agreed(Err(error)) => Computed::Agreed(Err(error)),
            Self::Responded(Ok(both)) => {
                Computed::Responded(Ok((both.public.0, shared(both.shared)?)))
            }
            Self::Responded(Err(error)) => Computed::Responded(Err(error)),
            Self::Signed(result) => Computed::Signed(
                result
                    .map(|signed| (signed.method, signed.auth.0))
                    .map_err(SignatureError::Recorded),
            ),
            Self::Verified(Ok(peer)) => Computed::Verified(Ok(Box::new(peer.restore()?))),
            Self::Verified(Err(error)) => Computed::Verified(Err(PeerAuthError::Recorded(error))),
        })
    }
}

impl VerifiedRecord {
    fn of(peer: &VerifiedPeer) -> Self {
        let der = |certificate: &Arc<Certificate>| Octets(certificate.der().to_vec());
        Self {
            certificate: peer.certificate.as_ref().map(der),
            key: Octets(peer.key.spki().to_vec()),
            scheme: peer.scheme,
            authorities: peer.authorities.iter().map(der).collect(),
        }
    }

    fn restore(self) -> Result<VerifiedPeer, String> {
        let parsed = |der: &Octets| certificate(der).map(Arc::new);
        Ok(VerifiedPeer {
            certificate: self.certificate.as_ref().map(parsed).transpose()?,
            key: PublicKey::from_spki(&self.key.0).map_err(|error| error.to_string())?,
            scheme: self.scheme,
            authorities: self
                .authorities
                .iter()
                .map(parsed)
                .collect::<Result<_, _>>()?,
        })
    }
}

/// The private value of a key exchange, which is not in a recording.
struct NotHere;

impl PrivateValue for NotHere {
    fn agree(self: Box<Self>, _peer: &[u8]) -> Result<Secret, CryptoError> {
        Err(CryptoError::Library)
    }
}
