// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Frames: packets with a length in front, on a byte stream.

use std::io;

use tokio::io::{AsyncRead, AsyncReadExt as _};
use zeroize::{Zeroize as _, Zeroizing};

/// Longest packet that either side may send, in octets without the length field: 512 KiB.
pub const MAX_FRAME: usize = 512 * 1024;

const SMALL: usize = 4096;

/// Cuts a stream into frames. Memory grows with what was received, never with what a length field
/// promises, and is erased after use because frames carry secrets.
#[derive(Debug)]
pub struct FrameReader<R> {
    inner: R,
    buf: Vec<u8>,
    start: usize,
    end: usize,
}

impl<R: AsyncRead + Unpin> FrameReader<R> {
    /// Reads frames from `inner`.
    pub fn new(inner: R) -> Self {
        Self {
            inner,
            buf: vec![0; SMALL],
            start: 0,
            end: 0,
        }
    }

    /// What it reads from, for example to read on where a frame cannot be had.
    pub fn get_mut(&mut self) -> &mut R {
        &mut self.inner
    }

    /// The next packet's octets, or `None` at the end of the stream. Cancelling this future loses
    /// nothing.
    ///
    /// # Errors
    /// If the stream fails or ends inside a frame, or a frame is longer than [`MAX_FRAME`]. The
    /// stream is of no use afterwards.
    pub async fn next(&mut self) -> Result<Option<Zeroizing<Vec<u8>>>, FrameError> {
        loop {
            if let Some(frame) = self.take()? {
                return Ok(Some(frame));
            }
            self.make_room();
            let count = self.inner.read(&mut self.buf[self.end..]).await?;
            if count == 0 {
                return if self.start == self.end {
                    Ok(None)
                } else {
                    Err(FrameError::Truncated)
                };
            }
            self.end += count;
        }
    }

    fn take(&mut self) -> Result<Option<Zeroizing<Vec<u8>>>, FrameError> {
        let filled = &self.buf[self.start..self.end];
        let Some((header, rest)) = filled.split_first_chunk::<4>() else {
            return Ok(None);
        };
        let len = u32::from_be_bytes(*header);
        let len = usize::try_from(len)
            .ok()
            .filter(|&len| len <= MAX_FRAME)
            .ok_or(FrameError::TooLong(len))?;
        if rest.len() < len {
            return Ok(None);
        }
        let frame = Zeroizing::new(rest[..len].to_vec());
        self.buf[self.start..self.start + 4 + len].zeroize();
        self.start += 4 + len;
        Ok(Some(frame))
    }

    /// Leaves at least one octet to read into.
    fn make_room(&mut self) {
        if self.start > 0 {
            self.buf.copy_within(self.start..self.end, 0);
            let kept = self.end - self.start;
            self.buf[kept..self.end].zeroize();
            (self.start, self.end) = (0, kept);
        }
        let wanted = if self.end == self.buf.len() {
            (self.buf.len() * 2).min(MAX_FRAME + 4)
        } else if self.end == 0 && self.buf.len() > SMALL {
            SMALL
        } else {
            return;
        };
        // Not `resize`: growing in place would leave the old copy in freed memory.
        let mut fresh = vec![0; wanted];
        fresh[..self.end].copy_from_slice(&self.buf[..self.end]);
        self.buf.zeroize();
        self.buf = fresh;
    }
}

impl<R> Drop for FrameReader<R> {
    fn drop(&mut self) {
        self.buf.zeroize();
    }
}

/// Why no frame can be read.
#[derive(Debug, thiserror::Error)]
pub enum FrameError {
    /// The stream failed.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// The stream ended inside a frame.
    #[error("connection closed inside a packet")]
    Truncated,
    /// A length field above [`MAX_FRAME`].
    #[error("packet of {0} octets exceeds the limit of {MAX_FRAME}")]
    TooLong(u32),
}

#[cfg(test)]
mod tests {
    use tokio::io::AsyncWriteExt as _;

    use super::*;

    fn frame(body: &[u8]) -> Vec<u8> {
        let mut out = u32::try_from(body.len()).unwrap().to_be_bytes().to_vec();
        out.extend_from_slice(body);
        out
    }

    #[tokio::test]
    async fn frames_may_be_split_and_joined_anywhere() {
        let big = vec![7; MAX_FRAME];
        let bodies: [&[u8]; 5] = [b"one", b"", &big, b"two", b"three"];
        let stream: Vec<u8> = bodies.iter().flat_map(|body| frame(body)).collect();
        for chunk in [1000, 4096, 65_537, stream.len()] {
            let (mut tx, rx) = tokio::io::duplex(64 * 1024);
            let octets = stream.clone();
            let writer = tokio::spawn(async move {
                for part in octets.chunks(chunk) {
                    tx.write_all(part).await.unwrap();
                }
            });
            let mut reader = FrameReader::new(rx);

            for body in bodies {
                assert_eq!(reader.next().await.unwrap().unwrap().as_slice(), body);
            }
            assert!(reader.next().await.unwrap().is_none());
            writer.await.unwrap();
        }
    }

    #[tokio::test]
    async fn a_length_above_the_limit_is_an_error() {
        let octets = 524_289u32.to_be_bytes();
        let mut reader = FrameReader::new(octets.as_slice());
        assert!(matches!(
            reader.next().await,
            Err(FrameError::TooLong(524_289))
        ));
    }

    #[tokio::test]
    async fn an_end_inside_a_frame_is_an_error() {
        for octets in [&b"\x00\x00"[..], b"\x00\x00\x00\x05ab"] {
            let mut reader = FrameReader::new(octets);
            assert!(matches!(reader.next().await, Err(FrameError::Truncated)));
        }
    }

    #[tokio::test]
    async fn a_promised_length_reserves_no_memory() {
        let (mut tx, rx) = tokio::io::duplex(64);
        tx.write_all(&524_288u32.to_be_bytes()).await.unwrap();
        let mut reader = FrameReader::new(rx);
        let waited = tokio::time::timeout(std::time::Duration::from_millis(20), reader.next());
        assert!(waited.await.is_err());
        assert_eq!(reader.buf.len(), SMALL);
    }
}
