//! What the tests of models share with the suite of backends.

pub(super) use crate::conformance::host;
pub(super) use crate::conformance::models::{
    Sample as Subject, batch, freeze, gpt2, hf_models, llama, small,
};
