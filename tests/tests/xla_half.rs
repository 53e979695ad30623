//! Compiled steps with 16-bit parameters and arithmetic: their loss curve compared with that of the host in f32.

use fsdp_comm::launch::{LaunchFailure, Launcher, Seat};
use fsdp_core::engine::ProgramOrder;
use fsdp_nn::Backend;
use fsdp_nn::hf::HfModel;
use fsdp_nn::model::Adapted;
use fsdp_train::{Job, RankTrainer, TrainError};
use fsdp_xla::{Devices, ProgramOptions};

use crate::lora::job;
use crate::support::{LLAMA, config, options, threads};
use crate::xla::{LAYERS, plugin};

/// Ends before the model memorizes its few samples: near a loss of zero, small errors are relatively large.
const STEPS: u64 = 60;

/// Number of steps averaged into one point of the curve.
const WINDOW: usize = 20;

/// Maximum relative distance of a point from the f32 curve. A bf16 activation is rounded by up to 2^-8 after every
/// operation; over some dozens of operations, errors of either sign add up to a few times that.
const BAND: f64 = 5.0 / 256.0;

/// Returns the loss curve of a run.
fn curve<M: Backend>(launcher: &impl Launcher<Memory = M>, job: &Job<Adapted<HfModel>>) -> Vec<f64> {
    let losses = |seat: Seat<M>| -> Result<Vec<f64>, TrainError> {
        let mut trainer = RankTrainer::new(job, seat)?;
        (0..STEPS).map(|step| Ok(trainer.step(step, false, &mut ProgramOrder, &mut ())?.loss)).collect()
    };
    let ranks = launcher.launch(job.plan.mesh.world(), &losses);
    let losses =
        ranks.unwrap_or_else(|failure: LaunchFailure<TrainError>| panic!("{failure:?}")).swap_remove(0);
    losses.chunks(WINDOW).map(|window| window.iter().sum::<f64>() / window.len() as f64).collect()
}

#[test]
fn compiled_16_bit_losses_stay_close_to_host_f32() {
    let Some(plugin) = plugin() else { return };
    let dir = tempfile::tempdir().unwrap();
    let steps = format!("train.steps={STEPS}");
    let with = |more: &[&str]| {
        let overrides = [LAYERS, "run.ranks=2", "data.seq_len=24", &steps];
        job(LLAMA, config(dir.path(), 61, &[&overrides, more].concat()))
    };
    let full = curve(&threads(), &with(&[]));
    assert!(full[full.len() - 1] < 0.75 * full[0], "it learns: {full:.3?}");
    let devices = Devices::new(&plugin, 2, ProgramOptions::default(), options()).unwrap();
    let norms = &["fsdp.keep_f32=['norm']"][..];
    for (param, reduce, keep) in
        [("bf16", "f32", &[][..]), ("bf16", "f32", norms), ("bf16", "bf16", &[]), ("f16", "f32", norms)]
    {
        let (param_dtype, reduce_dtype) =
            (format!("fsdp.param_dtype=\"{param}\""), format!("fsdp.reduce_dtype=\"{reduce}\""));
        let mut more = [&["run.device=\"xla\"", &*param_dtype, &*reduce_dtype], keep].concat();
        // No step overflows at this scale, so all curves have the same number of updates.
        more.extend((param == "f16").then_some("train.loss_scale.init=256"));
        let half = curve(&devices, &with(&more));
        let apart = full.iter().zip(&half).map(|(full, half)| (half - full).abs() / full);
        let largest = apart.fold(0.0, f64::max);
        println!(
            "f32 {full:.4?}\n{param}, reduced in {reduce}, {keep:?} {half:.4?}: {largest:.4} apart at most"
        );
        assert!(largest <= BAND, "{param}, reduced in {reduce}: {half:.4?} for {full:.4?}");
    }
}
