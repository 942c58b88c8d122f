//! Proofs that the processes of a job know the same secret.

use std::fmt;

use ring::hmac;

/// The variable with the secret of a job.
pub const VARIABLE: &str = "ROLL_JOB_SECRET";

roll_core::inventory::submit! { roll_core::Variable(VARIABLE) }

/// A text that only the processes of a job know. It is never sent.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(Vec<u8>);

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret")
    }
}

/// The side that proves that it knows the secret. The proofs of the two sides differ, so that a side cannot send back
/// the proof that it has received.
#[derive(Clone, Copy)]
pub(super) enum Prover {
    Root,
    Peer,
}

impl Secret {
    /// `None` if `text` is empty.
    pub fn new(text: &str) -> Option<Self> {
        (!text.is_empty()).then(|| Self(text.into()))
    }

    /// HMAC-SHA256 of the bytes that both sides of a connection have exchanged: the random bytes of both, and the
    /// `Hello`.
    pub(super) fn proof(&self, prover: Prover, exchanged: &[u8]) -> Vec<u8> {
        hmac::sign(&self.key(), &message(prover, exchanged)).as_ref().to_vec()
    }

    /// Compares in constant time.
    pub(super) fn verifies(&self, prover: Prover, exchanged: &[u8], proof: &[u8]) -> bool {
        hmac::verify(&self.key(), &message(prover, exchanged), proof).is_ok()
    }

    fn key(&self) -> hmac::Key {
        hmac::Key::new(hmac::HMAC_SHA256, &self.0)
    }
}

/// The bytes that a proof authenticates.
fn message(prover: Prover, exchanged: &[u8]) -> Vec<u8> {
    let label: &[u8] = match prover {
        Prover::Root => b"roll rank 0",
        Prover::Peer => b"roll rank",
    };
    [&[label.len() as u8], label, exchanged].concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_proof_is_that_of_one_secret_one_side_and_one_exchange() {
        let secret = Secret::new("a long text").unwrap();
        let proof = secret.proof(Prover::Peer, b"exchanged");
        assert_eq!(proof.len(), 32);
        // As ranks of other builds of this version compute it: HMAC-SHA256 with the text as its key.
        assert_eq!(proof[..4], [218, 16, 251, 44]);
        assert!(secret.verifies(Prover::Peer, b"exchanged", &proof));
        assert!(!secret.verifies(Prover::Root, b"exchanged", &proof));
        assert!(!secret.verifies(Prover::Peer, b"another", &proof));
        assert!(!Secret::new("a long texT").unwrap().verifies(Prover::Peer, b"exchanged", &proof));
        assert!(!secret.verifies(Prover::Peer, b"exchanged", &proof[..31]) && Secret::new("").is_none());
        assert_eq!(format!("{secret:?}"), "Secret");
    }
}
