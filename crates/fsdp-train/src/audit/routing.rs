//! Whether a difference says anything where the choice of experts depends on rounding.

use fsdp_core::DType;
use fsdp_core::model::ModelSpec;

use super::measure::has_experts;
use super::report::{Cause, Finding};
use crate::error::TrainError;

/// Refuses an unexplained gradient of a mixture that computes in 16 bits. Where two experts are nearly as good for a token,
/// kernels that round otherwise choose another one, and the gradients of both are others by more than rounding.
///
/// # Errors
/// [`TrainError::Input`] for such a gradient.
pub(super) fn expect_decided(findings: &[Finding], spec: &ModelSpec, dtype: DType) -> Result<(), TrainError> {
    let is_coarse = matches!(dtype, DType::Bf16 | DType::F16);
    let open = findings.iter().find(|finding| finding.cause == Cause::Unexplained);
    match open.filter(|_| is_coarse && has_experts(spec)) {
        Some(finding) => Err(TrainError::Input(format!(
            "{}; but where two experts are nearly as good for a token, kernels that round otherwise in {dtype} choose another \
             one, so this says nothing about the program: let it make the two steps in float32",
            finding.text
        ))),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::audit::testing::spec;

    #[test]
    fn only_unexplained_mixtures_in_16_bits_are_undecided() {
        let finding = |cause| Finding {
            cause,
            params: Vec::new(),
            factor: None,
            explains: 0.0,
            text: "the gradient differs".to_owned(),
        };
        let [mixture, dense] = ["layers.0.mlp.experts.1.w1.weight", "layers.0.mlp.w1.weight"]
            .map(|name| spec(&[(name, &[2, 2])]));
        let (open, named) = ([finding(Cause::Unexplained)], [finding(Cause::GradientScaled)]);
        for dtype in [DType::Bf16, DType::F16] {
            let error = expect_decided(&open, &mixture, dtype).unwrap_err().to_string();
            assert!(error.starts_with("the gradient differs; but") && error.contains("float32"), "{error}");
            expect_decided(&named, &mixture, dtype).unwrap();
            expect_decided(&open, &dense, dtype).unwrap();
        }
        expect_decided(&open, &mixture, DType::F32).unwrap();
    }
}
