// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The Notify payload (RFC 7296 section 3.10).

use core::fmt;

use swanherd_ipsec::ProtocolId;

use super::error::WireError;
use super::payload::PayloadType;
use super::reader::Reader;

swanherd_ipsec::open_registry! {
    /// Notify message types (RFC 7296 section 3.10.1 and the IANA registry). Below 16384 are
    /// errors, from there on is status.
    pub enum NotifyType: u16 {
        UnsupportedCriticalPayload = 1, "UNSUPPORTED_CRITICAL_PAYLOAD";
        InvalidIkeSpi = 4, "INVALID_IKE_SPI";
        InvalidMajorVersion = 5, "INVALID_MAJOR_VERSION";
        InvalidSyntax = 7, "INVALID_SYNTAX";
        InvalidMessageId = 9, "INVALID_MESSAGE_ID";
        InvalidSpi = 11, "INVALID_SPI";
        NoProposalChosen = 14, "NO_PROPOSAL_CHOSEN";
        InvalidKePayload = 17, "INVALID_KE_PAYLOAD";
        AuthenticationFailed = 24, "AUTHENTICATION_FAILED";
        SinglePairRequired = 34, "SINGLE_PAIR_REQUIRED";
        NoAdditionalSas = 35, "NO_ADDITIONAL_SAS";
        InternalAddressFailure = 36, "INTERNAL_ADDRESS_FAILURE";
        FailedCpRequired = 37, "FAILED_CP_REQUIRED";
        TsUnacceptable = 38, "TS_UNACCEPTABLE";
        InvalidSelectors = 39, "INVALID_SELECTORS";
        UnacceptableAddresses = 40, "UNACCEPTABLE_ADDRESSES";
        UnexpectedNatDetected = 41, "UNEXPECTED_NAT_DETECTED";
        UseAssignedHoA = 42, "USE_ASSIGNED_HoA";
        TemporaryFailure = 43, "TEMPORARY_FAILURE";
        ChildSaNotFound = 44, "CHILD_SA_NOT_FOUND";
        InvalidGroupId = 45, "INVALID_GROUP_ID";
        AuthorizationFailed = 46, "AUTHORIZATION_FAILED";
        StateNotFound = 47, "STATE_NOT_FOUND";
        InitialContact = 16384, "INITIAL_CONTACT";
        SetWindowSize = 16385, "SET_WINDOW_SIZE";
        AdditionalTsPossible = 16386, "ADDITIONAL_TS_POSSIBLE";
        IpcompSupported = 16387, "IPCOMP_SUPPORTED";
        NatDetectionSourceIp = 16388, "NAT_DETECTION_SOURCE_IP";
        NatDetectionDestinationIp = 16389, "NAT_DETECTION_DESTINATION_IP";
        Cookie = 16390, "COOKIE";
        UseTransportMode = 16391, "USE_TRANSPORT_MODE";
        HttpCertLookupSupported = 16392, "HTTP_CERT_LOOKUP_SUPPORTED";
        RekeySa = 16393, "REKEY_SA";
        EspTfcPaddingNotSupported = 16394, "ESP_TFC_PADDING_NOT_SUPPORTED";
        NonFirstFragmentsAlso = 16395, "NON_FIRST_FRAGMENTS_ALSO";
        MobikeSupported = 16396, "MOBIKE_SUPPORTED";
        AdditionalIp4Address = 16397, "ADDITIONAL_IP4_ADDRESS";
        AdditionalIp6Address = 16398, "ADDITIONAL_IP6_ADDRESS";
        NoAdditionalAddresses = 16399, "NO_ADDITIONAL_ADDRESSES";
        UpdateSaAddresses = 16400, "UPDATE_SA_ADDRESSES";
        Cookie2 = 16401, "COOKIE2";
        NoNatsAllowed = 16402, "NO_NATS_ALLOWED";
        AuthLifetime = 16403, "AUTH_LIFETIME";
        MultipleAuthSupported = 16404, "MULTIPLE_AUTH_SUPPORTED";
        AnotherAuthFollows = 16405, "ANOTHER_AUTH_FOLLOWS";
        RedirectSupported = 16406, "REDIRECT_SUPPORTED";
        Redirect = 16407, "REDIRECT";
        RedirectedFrom = 16408, "REDIRECTED_FROM";
        TicketLifetimeOpaque = 16409, "TICKET_LT_OPAQUE";
        TicketRequest = 16410, "TICKET_REQUEST";
        TicketAck = 16411, "TICKET_ACK";
        TicketNack = 16412, "TICKET_NACK";
        TicketOpaque = 16413, "TICKET_OPAQUE";
        LinkId = 16414, "LINK_ID";
        UseWespMode = 16415, "USE_WESP_MODE";
        RohcSupported = 16416, "ROHC_SUPPORTED";
        EapOnlyAuthentication = 16417, "EAP_ONLY_AUTHENTICATION";
        ChildlessSupported = 16418, "CHILDLESS_IKEV2_SUPPORTED";
        QuickCrashDetection = 16419, "QUICK_CRASH_DETECTION";
        MessageIdSyncSupported = 16420, "IKEV2_MESSAGE_ID_SYNC_SUPPORTED";
        ReplayCounterSyncSupported = 16421, "IPSEC_REPLAY_COUNTER_SYNC_SUPPORTED";
        MessageIdSync = 16422, "IKEV2_MESSAGE_ID_SYNC";
        ReplayCounterSync = 16423, "IPSEC_REPLAY_COUNTER_SYNC";
        SecurePasswordMethods = 16424, "SECURE_PASSWORD_METHODS";
        PskPersist = 16425, "PSK_PERSIST";
        PskConfirm = 16426, "PSK_CONFIRM";
        ErxSupported = 16427, "ERX_SUPPORTED";
        IfomCapability = 16428, "IFOM_CAPABILITY";
        FragmentationSupported = 16430, "IKEV2_FRAGMENTATION_SUPPORTED";
        SignatureHashAlgorithms = 16431, "SIGNATURE_HASH_ALGORITHMS";
        CloneIkeSaSupported = 16432, "CLONE_IKE_SA_SUPPORTED";
        CloneIkeSa = 16433, "CLONE_IKE_SA";
        Puzzle = 16434, "PUZZLE";
        UsePpk = 16435, "USE_PPK";
        PpkIdentity = 16436, "PPK_IDENTITY";
        NoPpkAuth = 16437, "NO_PPK_AUTH";
        IntermediateSupported = 16438, "INTERMEDIATE_EXCHANGE_SUPPORTED";
        Ip4Allowed = 16439, "IP4_ALLOWED";
        Ip6Allowed = 16440, "IP6_ALLOWED";
        AdditionalKeyExchange = 16441, "ADDITIONAL_KEY_EXCHANGE";
        UseAggfrag = 16442, "USE_AGGFRAG";
        UseBeetMode = 40961, "BEET_MODE";
    }
}

impl NotifyType {
    /// Whether it says that something failed (RFC 7296 section 3.10.1).
    pub fn is_error(self) -> bool {
        u16::from(self) < 16384
    }

    /// The name in one-line renderings of messages, where the long ones would drown the rest.
    const fn short_name(self) -> Option<&'static str> {
        Some(match self {
            Self::NatDetectionSourceIp => "NATD_S_IP",
            Self::NatDetectionDestinationIp => "NATD_D_IP",
            Self::FragmentationSupported => "FRAG_SUP",
            Self::SignatureHashAlgorithms => "HASH_ALG",
            Self::ChildlessSupported => "CHDLESS_SUP",
            Self::MobikeSupported => "MOBIKE_SUP",
            Self::RedirectSupported => "REDIR_SUP",
            Self::InitialContact => "INIT_CONTACT",
            Self::MultipleAuthSupported => "MULT_AUTH",
            Self::MessageIdSyncSupported => "MSG_ID_SYN_SUP",
            _ => return self.name(),
        })
    }
}

/// An error or a status message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NotifyPayload {
    /// Protocol of the SPI; `None` if there is no SPI.
    pub protocol: Option<ProtocolId>,
    /// SPI that it is about; usually empty.
    pub spi: Vec<u8>,
    /// What it says.
    pub notify_type: NotifyType,
    /// Notification Data.
    pub data: Vec<u8>,
}

impl NotifyPayload {
    /// One that is not about a CHILD SA.
    pub const fn new(notify_type: NotifyType, data: Vec<u8>) -> Self {
        Self {
            protocol: None,
            spi: Vec::new(),
            notify_type,
            data,
        }
    }

    /// One about the CHILD SA with this SPI, such as REKEY_SA.
    pub fn for_child(notify_type: NotifyType, protocol: ProtocolId, spi: u32) -> Self {
        Self {
            protocol: Some(protocol),
            spi: spi.to_be_bytes().to_vec(),
            notify_type,
            data: Vec::new(),
        }
    }

    /// The SPI, if it is one of a CHILD SA.
    pub fn child_spi(&self) -> Option<u32> {
        <[u8; 4]>::try_from(self.spi.as_slice())
            .ok()
            .map(u32::from_be_bytes)
    }

    pub(super) fn parse(mut reader: Reader<'_>) -> Result<Self, WireError> {
        let [protocol, spi_len] = reader.array::<2>("no protocol or SPI size")?;
        let notify_type = reader.u16("no notify message type")?.into();
        let spi = reader.take(spi_len.into(), "SPI is cut off")?.to_vec();
        Ok(Self {
            protocol: (protocol != 0).then(|| protocol.into()),
            spi,
            notify_type,
            data: reader.rest().to_vec(),
        })
    }

    pub(super) fn emit(&self, out: &mut Vec<u8>) -> Result<(), WireError> {
        let Ok(spi_len) = u8::try_from(self.spi.len()) else {
            return Err(WireError::TooLong {
                payload: PayloadType::Notify,
                what: "SPI",
            });
        };
        out.extend_from_slice(&[self.protocol.map_or(0, u8::from), spi_len]);
        out.extend_from_slice(&u16::from(self.notify_type).to_be_bytes());
        out.extend_from_slice(&self.spi);
        out.extend_from_slice(&self.data);
        Ok(())
    }
}

impl fmt::Display for NotifyPayload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.notify_type.short_name() {
            Some(name) => write!(f, "N({name})"),
            None => write!(f, "N{}", self.notify_type),
        }
    }
}
