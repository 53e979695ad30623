//! Mutual proof that both ends of a connection know the token of this world.
//!
//! ```text
//! caller                                        answerer
//!   version (8 bytes), nonce c (32)      ->
//!                                        <-     version (8), nonce a (32), MAC of the answerer (32)
//!   MAC of the caller (32)               ->
//! ```
//!
//! A MAC is HMAC-SHA256 under the token over version, side, purpose and both nonces. A proof therefore cannot be
//! reflected to its sender, used on a connection of another purpose, or replayed. Before the proof, nothing but these
//! few bytes is read or kept. What follows is neither encrypted nor signed: the token keeps strangers out, but does not
//! protect against an attacker who can modify packets.

mod deadline;
pub mod gate;
mod token;

use std::io::{self, Read, Write};

use fsdp_core::FailureKind;
use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;

pub use deadline::authenticate_within;
pub use token::{Token, TokenError};

/// Protocol version. Change the number whenever the bytes of the proof, or of anything after it, change.
const VERSION: [u8; 8] = *b"fsdp\0\0\0\x01";

const NONCE_LEN: usize = 32;
const MAC_LEN: usize = 32;

/// An end of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// The end that connected.
    Caller,
    /// The end that accepted the connection.
    Answerer,
}

impl Side {
    fn other(self) -> Side {
        match self {
            Side::Caller => Side::Answerer,
            Side::Answerer => Side::Caller,
        }
    }
}

/// Why the authentication failed.
#[derive(Debug, thiserror::Error)]
pub enum AuthError {
    /// The connection failed or was closed, or the time limit was exceeded.
    #[error("the connection failed during authentication: {0}")]
    Connection(#[from] io::Error),
    /// The other end runs another program, or another version of this one.
    #[error(
        "the other end sent {got:02x?}, expected {VERSION:02x?}: it is not an fsdp process, or has another version; \
         start the same program everywhere"
    )]
    Version {
        /// The first bytes that it sent.
        got: [u8; 8],
    },
    /// The other end has another token.
    #[error("the other end has another token: start all processes of a run with the same one")]
    Token,
    /// The operating system cannot provide random numbers.
    #[error("cannot get random numbers: {0}")]
    Random(#[from] getrandom::Error),
}

impl AuthError {
    /// The kind of this failure.
    pub fn kind(&self) -> FailureKind {
        match self {
            AuthError::Connection(_) | AuthError::Random(_) => FailureKind::Temporary,
            AuthError::Version { .. } | AuthError::Token => FailureKind::Input,
        }
    }
}

/// Proves to the other end that this one knows the token, and demands the same proof. Both ends must pass the same
/// `purpose`.
///
/// Blocks as long as the stream does: see [`authenticate_within`] for a limit.
///
/// # Errors
/// [`AuthError`]. The stream is unusable afterwards.
pub fn authenticate<S: Read + Write>(
    stream: &mut S,
    token: &Token,
    side: Side,
    purpose: &[u8],
) -> Result<(), AuthError> {
    let mut local_nonce = [0; NONCE_LEN];
    getrandom::fill(&mut local_nonce)?;
    match side {
        Side::Caller => {
            write(stream, &[&VERSION, &local_nonce])?;
            let peer_nonce = read_nonce(stream)?;
            let proof = read::<MAC_LEN, S>(stream)?;
            let nonces = [local_nonce, peer_nonce];
            // Sent even if the other end's proof is wrong, so that it can report the mismatch as well; this MAC alone
            // gives nothing away.
            write(stream, &[&prove(token, side, purpose, &nonces)])?;
            verify(token, side.other(), purpose, &nonces, &proof)
        }
        Side::Answerer => {
            let peer_nonce = read_nonce(stream)?;
            let nonces = [peer_nonce, local_nonce];
            write(stream, &[&VERSION, &local_nonce, &prove(token, side, purpose, &nonces)])?;
            let proof = read::<MAC_LEN, S>(stream)?;
            verify(token, side.other(), purpose, &nonces, &proof)
        }
    }
}

/// The MAC over everything that both ends must agree on. `nonces` are the caller's, then the answerer's.
fn mac(token: &Token, side: Side, purpose: &[u8], nonces: &[[u8; NONCE_LEN]; 2]) -> Hmac<Sha256> {
    let mut mac = Hmac::<Sha256>::new_from_slice(token.bytes()).expect("HMAC takes keys of any length");
    mac.update(&VERSION);
    mac.update(&[side as u8]);
    mac.update(&(purpose.len() as u64).to_le_bytes());
    mac.update(purpose);
    nonces.iter().for_each(|nonce| mac.update(nonce));
    mac
}

fn prove(token: &Token, side: Side, purpose: &[u8], nonces: &[[u8; NONCE_LEN]; 2]) -> [u8; MAC_LEN] {
    mac(token, side, purpose, nonces).finalize().into_bytes().into()
}

fn verify(
    token: &Token,
    side: Side,
    purpose: &[u8],
    nonces: &[[u8; NONCE_LEN]; 2],
    proof: &[u8; MAC_LEN],
) -> Result<(), AuthError> {
    mac(token, side, purpose, nonces).verify_slice(proof).map_err(|_| AuthError::Token)
}

fn read_nonce<S: Read>(stream: &mut S) -> Result<[u8; NONCE_LEN], AuthError> {
    let got = read::<8, S>(stream)?;
    if got != VERSION {
        return Err(AuthError::Version { got });
    }
    Ok(read::<NONCE_LEN, S>(stream)?)
}

fn read<const LEN: usize, S: Read>(stream: &mut S) -> io::Result<[u8; LEN]> {
    let mut bytes = [0; LEN];
    stream.read_exact(&mut bytes)?;
    Ok(bytes)
}

/// Writes all parts in one write.
fn write<S: Write>(stream: &mut S, parts: &[&[u8]]) -> io::Result<()> {
    stream.write_all(&parts.concat())?;
    stream.flush()
}

#[cfg(test)]
mod tests;
