//! Random runs as processes over TCP, compared with the same runs as threads.

use proptest::prelude::*;
use proptest::sample::select;

use crate::processes::bits;
use crate::support::Sandbox;
use crate::world::{FSDP, World};

/// A run: overrides of the run file, and the number of processes.
#[derive(Clone, Debug)]
struct Case {
    processes: usize,
    overrides: Vec<String>,
}

fn cases() -> impl Strategy<Value = Case> {
    let world = (2usize..=4, 1usize..=2, 1usize..=3);
    let policy = (
        select(vec!["true", "false", "\"auto\""]),
        0usize..=2,
        select(vec!["reduce", "unsharded"]),
        select(vec!["tree", "running"]),
        select(vec!["none", "full", "selective"]),
    );
    let kinds = (
        select(vec!["f32", "bf16", "f64"]),
        select(vec!["none", "cpu"]),
        select(vec!["adamw", "sgd", "adafactor", "muon"]),
        any::<bool>(),
    );
    (world, policy, kinds).prop_map(|((processes, held, rounds), policy, kinds)| {
        let (reshard, prefetch, accumulation, order, checkpointing) = policy;
        let (dtype, offload, optimizer, is_replicated) = kinds;
        let ranks = processes * held;
        // The sandbox has 16 samples of data.
        let rounds = rounds.min(16 / ranks);
        // Muon needs whole matrices on the device.
        let offload = if optimizer == "muon" { "none" } else { offload };
        let lr = if optimizer == "adafactor" { "" } else { ",lr=0.01" };
        let replicas = if is_replicated && ranks.is_multiple_of(2) { 2 } else { 1 };
        let overrides = [
            format!("run.ranks={ranks}"),
            "train.micro_batch_size=1".to_owned(),
            format!("train.global_batch_size={}", ranks * rounds),
            format!("train.optimizer={{name=\"{optimizer}\"{lr}}}"),
            format!("fsdp.reshard_after_forward={reshard}"),
            format!("fsdp.forward_prefetch={prefetch}"),
            format!("fsdp.accumulation={accumulation}"),
            format!("fsdp.accumulation_order={order}"),
            format!("fsdp.activation_checkpointing={checkpointing}"),
            format!("fsdp.param_dtype={dtype}"),
            format!("fsdp.reduce_dtype={}", if dtype == "f64" { dtype } else { "f32" }),
            format!("fsdp.offload={offload}"),
            format!("fsdp.mesh={{replicate={replicas}}}"),
            "checkpoint.every=2".to_owned(),
        ];
        Case { processes, overrides: overrides.to_vec() }
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 12, ..ProptestConfig::default() })]
    #[test]
    fn random_runs_match_bitwise_between_processes_and_threads(case in cases()) {
        let sandbox = Sandbox::new();
        let overrides: Vec<String> = case.overrides.iter().map(|each| format!("--set {each}")).collect();
        let run = format!("train run.toml {}", overrides.join(" "));
        sandbox.succeed(&format!("{run} --set run.out_dir=threads"));
        World::succeed(&sandbox, FSDP, case.processes, &format!("{run} --set run.out_dir=processes"));
        prop_assert!(bits(&sandbox, "processes") == bits(&sandbox, "threads"));
    }
}
