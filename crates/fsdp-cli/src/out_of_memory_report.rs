//! The error of a step that does not fit into the memory of a PJRT device, with the ledger's prediction and remedies.

use fsdp_config::Resolved;
use fsdp_core::plan::Plan;
use fsdp_core::{Error, Rank};
use fsdp_nn::HostMemory;
use fsdp_nn::model::Architecture as _;
use fsdp_train::{TrainError, draft, predict};
use fsdp_xla::XlaError;

use crate::run_setup::Model;
use crate::units::bytes;

/// A step that does not fit into memory.
#[derive(Debug)]
pub(crate) struct OutOfMemoryReport {
    device: String,
    device_bytes: Option<u64>,
    message: String,
    predicted_bytes: u64,
    /// Changes with which it may fit.
    remedies: Vec<String>,
}

impl std::fmt::Display for OutOfMemoryReport {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "the step does not fit into the memory of a {}", self.device)?;
        if let Some(available) = self.device_bytes {
            write!(f, ", {}", bytes(available))?;
        }
        write!(f, "; the ledger predicts {}", bytes(self.predicted_bytes))?;
        if !self.remedies.is_empty() {
            write!(f, ". Try {}", self.remedies.join(", or "))?;
        }
        write!(f, ". XLA says: {}", self.message)
    }
}

/// Maximum lines of XLA's message that are shown.
const LINES: usize = 4;

/// The libtpu flag for the percentage of memory up to which transfers begin early.
const LESS_OVERLAP: &str = "xla_tpu_scheduler_percent_shared_memory_limit";

/// How far XLA's peak may be below the ledger's, in percent: at most 17 for six models (docs/xla.md).
const BELOW_LEDGER_PERCENT: u64 = 20;

impl OutOfMemoryReport {
    /// Describes a program that a plugin rejected; `None` if memory is not the reason.
    pub(crate) fn of(config: &Resolved, model: &Model, error: &XlaError) -> Option<Self> {
        let XlaError::Memory { device, bytes: device_bytes, message } = error else { return None };
        let plan = draft(config, &model.description().spec).ok()?;
        let predicted_bytes = predicted(config, model, &plan).ok()?;
        let lines = message.lines().map(str::trim).filter(|line| !line.is_empty());
        let message = lines.take(LINES).collect::<Vec<_>>().join(" ");
        // XLA needed more than the device has, so a size for which the ledger predicts as much is no remedy.
        let limit = device_bytes.unwrap_or(u64::MAX).min(predicted_bytes.saturating_sub(1));
        let mut remedies = remedies(config, model, limit);
        let may_overlap_less = device.starts_with("TPU")
            && device_bytes
                .is_some_and(|available| predicted_bytes / 100 * (100 - BELOW_LEDGER_PERCENT) <= available)
            && !std::env::var("LIBTPU_INIT_ARGS").is_ok_and(|flags| flags.contains(LESS_OVERLAP));
        if may_overlap_less {
            remedies.push(format!("--{LESS_OVERLAP}=50 in LIBTPU_INIT_ARGS (XLA then overlaps less)"));
        }
        let (device, device_bytes) = (device.clone(), *device_bytes);
        Some(Self { device, device_bytes, message, predicted_bytes, remedies })
    }

    /// Does the same as [`OutOfMemoryReport::of`] for a failed run.
    pub(crate) fn of_run(config: &Resolved, model: &Model, error: &TrainError) -> Option<Self> {
        match error {
            TrainError::RankFailed { source, .. } => Self::of_run(config, model, source),
            TrainError::Core(Error::Refused(source)) => Self::of(config, model, source.downcast_ref()?),
            _ => None,
        }
    }
}

/// Bytes of a rank's device, as predicted by the ledger.
///
/// # Errors
/// Those of the model: operations that do not fit together.
pub(crate) fn predicted(config: &Resolved, model: &Model, plan: &Plan) -> Result<u64, TrainError> {
    Ok(predict::<HostMemory, _>(config, model, plan, Rank(0))?.device.total_peak_bytes as u64)
}

/// Changes of the run file whose step needs at most `limit_bytes` according to the ledger: the largest half, quarter, ..
/// of the micro-batch, and gradients that are reduced in the dtype of the parameters if that is narrower.
fn remedies(config: &Resolved, model: &Model, limit_bytes: u64) -> Vec<String> {
    let fits = |config: &Resolved| {
        let plan = draft(config, &model.description().spec).ok()?;
        predicted(config, model, &plan).ok().filter(|&needed| needed <= limit_bytes)
    };
    let by_ledger = |change: String, needed| format!("{change} ({} by the ledger)", bytes(needed));
    let dp_degree = config.fsdp.mesh.dp_degree(config.run.ranks);
    let halves = std::iter::successors(Some(config.train.micro_batch_size / 2), |samples| Some(samples / 2));
    let smaller = halves
        .take_while(|&samples| samples > 0)
        .filter(|samples| config.train.global_batch_size.is_multiple_of(samples * dp_degree))
        .find_map(|samples| {
            let mut config = config.clone();
            config.train.micro_batch_size = samples;
            Some(by_ledger(format!("train.micro_batch_size = {samples}"), fits(&config)?))
        });
    let dtype = config.fsdp.param_dtype;
    let narrower = (dtype.size_bytes() < config.fsdp.reduce_dtype.size_bytes()).then(|| {
        let mut config = config.clone();
        config.fsdp.reduce_dtype = dtype;
        Some(by_ledger(format!("fsdp.reduce_dtype = \"{dtype}\""), fits(&config)?))
    });
    smaller.into_iter().chain(narrower.flatten()).collect()
}

#[cfg(test)]
mod tests {
    use fsdp_core::DType;
    use fsdp_nn::hf::HfConfig;
    use fsdp_train::adapter;

    use super::*;

    const RUN: &str = r#"
        [model]
        path = "unused"
        [data]
        train = ["unused"]
        format = "text"
        seq_len = 64
        [train]
        steps = 1
        micro_batch_size = 16
        global_batch_size = 64
        optimizer = { name = "adamw", lr = 1e-3 }
        lr_schedule = { name = "constant" }
        [run]
        ranks = 4
        out_dir = "unused"
    "#;
    const MODEL: &str = r#"{
        "model_type": "gpt2", "vocab_size": 256, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64,
        "initializer_range": 0.02
    }"#;

    #[test]
    fn report_suggests_fitting_micro_batch() {
        let config = Resolved::parse(RUN, "test", &[]).unwrap().config;
        let model = adapter::adapt(&config, HfConfig::parse(MODEL).unwrap().build().unwrap()).unwrap();
        let of = |samples: usize| {
            let mut config = config.clone();
            config.train.micro_batch_size = samples;
            predicted(&config, &model, &draft(&config, &model.description().spec).unwrap()).unwrap()
        };
        let smaller =
            |samples| format!("train.micro_batch_size = {samples} ({} by the ledger)", bytes(of(samples)));
        assert_eq!(remedies(&config, &model, of(8)), [smaller(8)]);
        assert_eq!(remedies(&config, &model, of(8) - 1), [smaller(4)]);
        assert!(remedies(&config, &model, of(1) - 1).is_empty());
        let mut half = config.clone();
        half.fsdp.param_dtype = DType::Bf16;
        let found = remedies(&half, &model, of(16));
        assert!(found[0].starts_with("train.micro_batch_size = 8 ("), "{found:?}");
        assert!(found[1].starts_with("fsdp.reduce_dtype = \"bf16\" (") && found.len() == 2, "{found:?}");
        let mut report = OutOfMemoryReport {
            message: "Used 26.01G of 15.75G hbm".to_owned(),
            device: "TPU v5 lite".to_owned(),
            predicted_bytes: 20 << 30,
            device_bytes: Some(16 << 30),
            remedies: vec!["this".to_owned(), "that".to_owned()],
        };
        assert_eq!(
            report.to_string(),
            "the step does not fit into the memory of a TPU v5 lite, 16.0 GiB; the ledger predicts 20.0 GiB. Try this, or that. \
             XLA says: Used 26.01G of 15.75G hbm"
        );
        (report.device_bytes, report.remedies) = (None, Vec::new());
        assert_eq!(
            report.to_string(),
            "the step does not fit into the memory of a TPU v5 lite; the ledger predicts 20.0 GiB. XLA says: Used 26.01G of \
             15.75G hbm"
        );
    }
}
