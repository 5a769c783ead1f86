// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The IANA "IKEv2 Parameters" registries that more than one layer speaks of.
//!
//! Every registry is open: a code point that this build does not know is kept as
//! `Unknown(n)` and survives a round trip.

/// Declares an open registry: a C-like enum with an `Unknown` arm and conversions to and from the
/// number on the wire. `Display` prints the name that VICI and the logs use; serde writes the number.
#[macro_export]
macro_rules! open_registry {
    ($(#[$meta:meta])* $vis:vis enum $name:ident : $int:ty { $($(#[$vmeta:meta])* $variant:ident = $value:literal, $text:literal;)+ }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        $vis enum $name {
            $($(#[$vmeta])* #[doc = concat!("`", $text, "`, code point ", $value, ".")] $variant,)+
            /// A code point without a name here.
            Unknown($int),
        }

        impl $name {
            /// Every named code point, in registry order.
            pub const KNOWN: &'static [Self] = &[$(Self::$variant),+];

            /// The name used by VICI, or `None` for an unknown code point.
            pub const fn name(self) -> Option<&'static str> {
                match self { $(Self::$variant => Some($text),)+ Self::Unknown(_) => None }
            }
        }

        impl From<$int> for $name {
            fn from(value: $int) -> Self {
                match value { $($value => Self::$variant,)+ other => Self::Unknown(other) }
            }
        }

        impl From<$name> for $int {
            fn from(value: $name) -> Self {
                match value { $($name::$variant => $value,)+ $name::Unknown(other) => other }
            }
        }

        impl $crate::serde::Serialize for $name {
            fn serialize<S: $crate::serde::Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
                <$int>::from(*self).serialize(to)
            }
        }

        impl<'de> $crate::serde::Deserialize<'de> for $name {
            fn deserialize<D: $crate::serde::Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
                <$int as $crate::serde::Deserialize>::deserialize(from).map(Self::from)
            }
        }

        impl ::core::fmt::Display for $name {
            fn fmt(&self, f: &mut ::core::fmt::Formatter<'_>) -> ::core::fmt::Result {
                match self {
                    $(Self::$variant => f.write_str($text),)+
                    Self::Unknown(other) => write!(f, "({other})"),
                }
            }
        }
    };
}

open_registry! {
    /// Transform Type 1, encryption algorithms.
    pub enum EncryptionId: u16 {
        TripleDes = 3, "3DES_CBC";
        Blowfish = 7, "BLOWFISH_CBC";
        Null = 11, "NULL";
        AesCbc = 12, "AES_CBC";
        AesCtr = 13, "AES_CTR";
        AesCcm8 = 14, "AES_CCM_8";
        AesCcm12 = 15, "AES_CCM_12";
        AesCcm16 = 16, "AES_CCM_16";
        AesGcm8 = 18, "AES_GCM_8";
        AesGcm12 = 19, "AES_GCM_12";
        AesGcm16 = 20, "AES_GCM_16";
        NullAesGmac = 21, "NULL_AES_GMAC";
        CamelliaCbc = 23, "CAMELLIA_CBC";
        CamelliaCtr = 24, "CAMELLIA_CTR";
        CamelliaCcm8 = 25, "CAMELLIA_CCM_8";
        CamelliaCcm12 = 26, "CAMELLIA_CCM_12";
        CamelliaCcm16 = 27, "CAMELLIA_CCM_16";
        ChaCha20Poly1305 = 28, "CHACHA20_POLY1305";
    }
}

impl EncryptionId {
    /// Whether the algorithm authenticates too (RFC 5282), so that no integrity transform goes with it.
    pub const fn is_aead(self) -> bool {
        matches!(
            self,
            Self::AesCcm8
                | Self::AesCcm12
                | Self::AesCcm16
                | Self::AesGcm8
                | Self::AesGcm12
                | Self::AesGcm16
                | Self::NullAesGmac
                | Self::CamelliaCcm8
                | Self::CamelliaCcm12
                | Self::CamelliaCcm16
                | Self::ChaCha20Poly1305
        )
    }
}

open_registry! {
    /// Transform Type 2, pseudorandom functions.
    pub enum PrfId: u16 {
        HmacMd5 = 1, "PRF_HMAC_MD5";
        HmacSha1 = 2, "PRF_HMAC_SHA1";
        Aes128Xcbc = 4, "PRF_AES128_XCBC";
        HmacSha2_256 = 5, "PRF_HMAC_SHA2_256";
        HmacSha2_384 = 6, "PRF_HMAC_SHA2_384";
        HmacSha2_512 = 7, "PRF_HMAC_SHA2_512";
        Aes128Cmac = 8, "PRF_AES128_CMAC";
    }
}

open_registry! {
    /// Transform Type 3, integrity algorithms. The number 1024 is strongSwan's private code point
    /// for HMAC-SHA-256 truncated to 96 bits.
    pub enum IntegrityId: u16 {
        HmacMd5_96 = 1, "HMAC_MD5_96";
        HmacSha1_96 = 2, "HMAC_SHA1_96";
        AesXcbc96 = 5, "AES_XCBC_96";
        HmacMd5_128 = 6, "HMAC_MD5_128";
        HmacSha1_160 = 7, "HMAC_SHA1_160";
        AesCmac96 = 8, "AES_CMAC_96";
        HmacSha2_256_128 = 12, "HMAC_SHA2_256_128";
        HmacSha2_384_192 = 13, "HMAC_SHA2_384_192";
        HmacSha2_512_256 = 14, "HMAC_SHA2_512_256";
        HmacSha2_256_96 = 1024, "HMAC_SHA2_256_96";
    }
}

open_registry! {
    /// Transform Type 4, key exchange methods.
    pub enum KeyExchangeId: u16 {
        None = 0, "KE_NONE";
        Modp768 = 1, "MODP_768";
        Modp1024 = 2, "MODP_1024";
        Modp1536 = 5, "MODP_1536";
        Modp2048 = 14, "MODP_2048";
        Modp3072 = 15, "MODP_3072";
        Modp4096 = 16, "MODP_4096";
        Modp6144 = 17, "MODP_6144";
        Modp8192 = 18, "MODP_8192";
        Ecp256 = 19, "ECP_256";
        Ecp384 = 20, "ECP_384";
        Ecp521 = 21, "ECP_521";
        Modp1024s160 = 22, "MODP_1024_160";
        Modp2048s224 = 23, "MODP_2048_224";
        Modp2048s256 = 24, "MODP_2048_256";
        Ecp192 = 25, "ECP_192";
        Ecp224 = 26, "ECP_224";
        Ecp224Bp = 27, "ECP_224_BP";
        Ecp256Bp = 28, "ECP_256_BP";
        Ecp384Bp = 29, "ECP_384_BP";
        Ecp512Bp = 30, "ECP_512_BP";
        Curve25519 = 31, "CURVE_25519";
        Curve448 = 32, "CURVE_448";
        MlKem512 = 35, "ML_KEM_512";
        MlKem768 = 36, "ML_KEM_768";
        MlKem1024 = 37, "ML_KEM_1024";
    }
}
