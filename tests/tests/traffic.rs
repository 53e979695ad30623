//! Bytes and calls counted by the communicators, compared with formulas for a model whose units need no padding.
//!
//! The formulas follow from the definition of fully sharded training alone: how often each unit is gathered and
//! reduced, and that one of n ranks sends (n - 1) / n of a gathered or scattered unit and twice that of an all-reduced
//! one. They share no code with `fsdp_train::verify`.

use fsdp_core::comm::Traffic;
use fsdp_core::engine::ProgramOrder;
use fsdp_core::scalars::SCALAR_WORDS;
use fsdp_nn::model::{Mlp, MlpConfig};

use crate::runs::train;
use crate::support::{config, job_of, threads};

const STEPS: usize = 3;
const LAYERS: usize = 3;
/// Elements of one layer: 16 x 16, no bias; every shard axis of up to 8 divides its rows.
const LAYER: usize = 16 * 16;
/// Elements of the root unit: embedding and head of 32 tokens.
const ROOT: usize = 2 * 32 * 16;

/// Returns the traffic of one rank over all steps.
fn measured(ranks: usize, replicas: usize, rounds: usize, more: &[&str]) -> Traffic {
    let dir = tempfile::tempdir().unwrap();
    let sizes = MlpConfig { vocab: 32, widths: vec![16; LAYERS + 1], bias: false, tied: false, std: 0.2 };
    let (ranks_set, replicas_set) =
        (format!("run.ranks={ranks}"), format!("fsdp.mesh={{ replicate = {replicas} }}"));
    let batch = format!("train.global_batch_size={}", ranks * rounds);
    let mut overrides =
        vec![&*ranks_set, &*replicas_set, &*batch, "train.micro_batch_size=1", "fsdp.wrap=[\"MlpLayer\"]"];
    overrides.extend(more);
    let job = job_of(Mlp::new(&sizes).unwrap(), config(dir.path(), 32, &overrides));
    let outcome = train(&[job], &threads(), STEPS as u64, |_| Box::new(ProgramOrder)).unwrap();
    assert!(outcome.iter().all(|rank| rank.traffic == outcome[0].traffic), "all ranks send the same");
    outcome[0].traffic
}

/// Returns calls and bytes of `times` gathers or scatters of `elements` in a group of `n`.
fn moved(times: usize, elements: usize, bytes: usize, n: usize) -> [u64; 2] {
    [times as u64, (times * elements * bytes * (n - 1) / n) as u64]
}

fn sum(terms: &[[u64; 2]]) -> (u64, u64) {
    let over_steps = |index: usize| STEPS as u64 * terms.iter().map(|term| term[index]).sum::<u64>();
    (over_steps(0), over_steps(1))
}

fn gathers(traffic: Traffic) -> (u64, u64) {
    (traffic.all_gathers, traffic.all_gather_bytes)
}

fn scatters(traffic: Traffic) -> (u64, u64) {
    (traffic.reduce_scatters, traffic.reduce_scatter_bytes)
}

fn all_reduces(traffic: Traffic) -> (u64, u64) {
    (traffic.all_reduces, traffic.all_reduce_bytes)
}

/// Returns calls and bytes of the one all-reduce in every step: loss, count, norm and stop request.
fn scalars(world: usize) -> [u64; 2] {
    [1, (2 * SCALAR_WORDS * 8 * (world - 1) / world) as u64]
}

#[test]
fn resharded_layers_are_gathered_twice_and_root_once() {
    for (ranks, rounds) in [(1, 1), (2, 1), (2, 3), (4, 2), (8, 1)] {
        for reshard in ["\"auto\"", "true"] {
            let set = format!("fsdp.reshard_after_forward={reshard}");
            let traffic = measured(ranks, 1, rounds, &[&set]);
            let layers = moved(2 * LAYERS * rounds, LAYER, 4, ranks);
            assert_eq!(gathers(traffic), sum(&[layers, moved(rounds, ROOT, 4, ranks)]), "{ranks} {reshard}");
            let layers = moved(LAYERS * rounds, LAYER, 4, ranks);
            assert_eq!(scatters(traffic), sum(&[layers, moved(rounds, ROOT, 4, ranks)]));
            assert_eq!(all_reduces(traffic), sum(&[scalars(ranks)]));
        }
    }
}

#[test]
fn layers_without_reshard_are_gathered_once() {
    for (ranks, rounds) in [(2, 2), (4, 1)] {
        let traffic = measured(ranks, 1, rounds, &["fsdp.reshard_after_forward=false"]);
        let terms = [moved(LAYERS * rounds, LAYER, 4, ranks), moved(rounds, ROOT, 4, ranks)];
        assert_eq!(gathers(traffic), sum(&terms));
        assert_eq!(scatters(traffic), sum(&terms));
    }
}

#[test]
fn reshard_groups_gather_among_fewer_ranks_in_backward() {
    for (ranks, replicas, group) in [(4, 1, 2), (8, 1, 4), (8, 2, 2)] {
        let set = format!("fsdp.reshard_after_forward={group}");
        let traffic = measured(ranks, replicas, 2, &[&set]);
        let shards = ranks / replicas;
        let forward = [moved(2 * LAYERS, LAYER, 4, shards), moved(2, ROOT, 4, shards)];
        let backward = moved(2 * LAYERS, LAYER, 4, group);
        assert_eq!(gathers(traffic), sum(&[forward[0], forward[1], backward]));
    }
}

#[test]
fn unsharded_accumulation_reduces_once_per_step() {
    for order in ["\"tree\"", "\"running\""] {
        let set = format!("fsdp.accumulation_order={order}");
        let traffic = measured(4, 1, 4, &["fsdp.accumulation=\"unsharded\"", &set]);
        assert_eq!(scatters(traffic), sum(&[moved(LAYERS, LAYER, 4, 4), moved(1, ROOT, 4, 4)]));
        assert_eq!(gathers(traffic), sum(&[moved(8 * LAYERS, LAYER, 4, 4), moved(4, ROOT, 4, 4)]));
    }
}

#[test]
fn replicas_all_reduce_shards_once_per_step() {
    for (ranks, replicas, rounds) in [(2, 2, 1), (4, 2, 3), (8, 4, 1), (8, 2, 2)] {
        let traffic = measured(ranks, replicas, rounds, &[]);
        let shards = ranks / replicas;
        let shard = (LAYERS * LAYER + ROOT) / shards;
        // An all-reduce counts as a reduce-scatter plus an all-gather.
        let replicated = [LAYERS as u64 + 1, 2 * moved(1, shard, 4, replicas)[1]];
        assert_eq!(all_reduces(traffic), sum(&[replicated, scalars(ranks)]), "{ranks} / {replicas}");
        let layers = moved(2 * LAYERS * rounds, LAYER, 4, shards);
        assert_eq!(gathers(traffic), sum(&[layers, moved(rounds, ROOT, 4, shards)]));
    }
}

#[test]
fn collectives_use_the_configured_dtypes() {
    let (half, full) = (2, 4);
    let traffic = measured(4, 1, 1, &["fsdp.param_dtype=\"bf16\""]);
    assert_eq!(gathers(traffic), sum(&[moved(2 * LAYERS, LAYER, half, 4), moved(1, ROOT, half, 4)]));
    assert_eq!(scatters(traffic), sum(&[moved(LAYERS, LAYER, full, 4), moved(1, ROOT, full, 4)]));
    let traffic = measured(4, 1, 1, &["fsdp.reduce_dtype=\"bf16\""]);
    assert_eq!(gathers(traffic), sum(&[moved(2 * LAYERS, LAYER, full, 4), moved(1, ROOT, full, 4)]));
    assert_eq!(scatters(traffic), sum(&[moved(LAYERS, LAYER, half, 4), moved(1, ROOT, half, 4)]));
}

#[test]
fn frozen_layers_are_not_reduced_or_regathered() {
    // Backward ends at the head, since nothing below it is trained.
    let traffic = measured(4, 1, 2, &["fsdp.frozen=[\"layers\", \"embed\"]"]);
    assert_eq!(gathers(traffic), sum(&[moved(2 * LAYERS, LAYER, 4, 4), moved(2, ROOT, 4, 4)]));
    assert_eq!(scatters(traffic), sum(&[moved(2, ROOT / 2, 4, 4)]));
}

#[test]
fn muon_directions_are_gathered_once_per_step() {
    let muon = "train.optimizer={ name = \"muon\" }";
    for (ranks, replicas, rounds) in [(1, 1, 1), (2, 1, 2), (4, 1, 1), (4, 2, 2), (8, 2, 1)] {
        let (with, without) =
            (measured(ranks, replicas, rounds, &[muon]), measured(ranks, replicas, rounds, &[]));
        let layers = moved(2 * LAYERS * rounds, LAYER, 4, ranks / replicas);
        let (root, directions) =
            (moved(rounds, ROOT, 4, ranks / replicas), moved(LAYERS, LAYER, 4, ranks / replicas));
        assert_eq!(gathers(with), sum(&[layers, root, directions]), "{ranks} / {replicas}");
        assert_eq!((scatters(with), all_reduces(with)), (scatters(without), all_reduces(without)));
    }
    // Directions travel in the dtype of reduced gradients; units without hidden matrices send none.
    let half = measured(4, 1, 1, &[muon, "fsdp.reduce_dtype=\"bf16\""]);
    let terms = [moved(2 * LAYERS, LAYER, 4, 4), moved(1, ROOT, 4, 4), moved(LAYERS, LAYER, 2, 4)];
    assert_eq!(gathers(half), sum(&terms));
}
