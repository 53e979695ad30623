//! Results sent between processes as JSON; an error is reduced to its message and kind.

use fsdp_comm::process::SerdeKind;
use fsdp_core::FailureKind;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::error::TrainError;

/// An error, as it is sent.
#[derive(Serialize, Deserialize)]
struct WireError {
    #[serde(with = "SerdeKind")]
    kind: FailureKind,
    message: String,
}

/// Encodes a result.
pub(crate) fn encode<T: Serialize>(result: Result<&T, &TrainError>) -> Vec<u8> {
    let to_wire = |error: &TrainError| WireError { kind: error.kind(), message: error.to_string() };
    serde_json::to_vec(&result.map_err(to_wire)).expect("what ranks tell each other has a JSON form")
}

/// Decodes a result of [`encode`]; an error becomes [`TrainError::Remote`].
///
/// # Panics
/// If the bytes are not from [`encode`] of the same program, which ranks verify before they begin.
pub(crate) fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, TrainError> {
    let result: Result<T, WireError> = serde_json::from_slice(bytes).expect("all ranks run the same program");
    result.map_err(|WireError { kind, message }| TrainError::Remote { kind, message })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn error_message_and_kind_round_trip() {
        let io = std::io::Error::from(std::io::ErrorKind::StorageFull);
        for error in
            [TrainError::SaveUnfinished("late".into()), TrainError::Stopped, TrainError::io("write", "a")(io)]
        {
            let decoded = decode::<()>(&encode::<()>(Err(&error))).unwrap_err();
            assert_eq!(decoded.to_string(), error.to_string());
            assert_eq!(decoded.kind(), error.kind());
        }
        assert_eq!(decode::<u64>(&encode(Ok(&7u64))).unwrap(), 7);
    }
}
