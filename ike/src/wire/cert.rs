// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The Certificate payload (RFC 7296 section 3.6).

use super::error::WireError;
use super::reader::Reader;

swanherd_ipsec::open_registry! {
    /// Certificate encodings (RFC 7296 section 3.6).
    pub enum CertEncoding: u8 {
        Pkcs7 = 1, "PKCS7_WRAPPED_X509";
        Pgp = 2, "PGP";
        DnsSignedKey = 3, "DNS_SIGNED_KEY";
        X509Signature = 4, "X509_SIGNATURE";
        KerberosToken = 6, "KERBEROS_TOKENS";
        Crl = 7, "CRL";
        Arl = 8, "ARL";
        SpkiCertificate = 9, "SPKI";
        X509Attribute = 10, "X509_ATTRIBUTE";
        RawRsaKey = 11, "RAW_RSA_KEY";
        HashAndUrl = 12, "X509_HASH_AND_URL";
        HashAndUrlBundle = 13, "X509_HASH_AND_URL_BUNDLE";
        OcspContent = 14, "OCSP_CONTENT";
        RawPublicKey = 15, "RAW_PUBLIC_KEY";
    }
}

/// A certificate or something that stands for one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CertPayload {
    /// What the data is.
    pub encoding: CertEncoding,
    /// Certificate Data; DER for [`CertEncoding::X509Signature`].
    pub data: Vec<u8>,
}

impl CertPayload {
    pub(super) fn parse(mut reader: Reader<'_>) -> Result<Self, WireError> {
        Ok(Self {
            encoding: reader.u8("no certificate encoding")?.into(),
            data: reader.rest().to_vec(),
        })
    }

    pub(super) fn emit(&self, out: &mut Vec<u8>) {
        out.push(self.encoding.into());
        out.extend_from_slice(&self.data);
    }
}
