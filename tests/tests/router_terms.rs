//! What routers add to the loss: compared with their equations (tests/golden/router_terms.py), and in whole runs.

use std::ops::Range;
use std::sync::Arc;

use fsdp_core::memory::{Buffer, Category, HostSlice, HostSliceMut, Memory, Slice, SliceMut};
use fsdp_core::{DType, Queue};
use fsdp_nn::backend::{Backend, BatchFacts, Operands, Write};
use fsdp_nn::hf::HfConfig;
use fsdp_nn::model::Architecture as _;
use fsdp_nn::op::{Experts, Gating, Op, RouterTerms, Routing, Scoring};
use fsdp_nn::{HostBuffer, HostMemory, HostOptions};
use fsdp_train::{InitSource, Job};
use serde_json::Value;

use crate::expert_axis::{check, model};
use crate::experts::reports;
use crate::golden_training::golden;
use crate::support::{config, packed};

const SEQ: usize = 6;
const TOLERANCE: f64 = 1e-13;

fn numbers(value: &Value) -> Vec<f64> {
    value.as_array().unwrap().iter().map(|number| number.as_f64().unwrap()).collect()
}

/// The routers of an entry, without a gradient of the experts' weights.
struct Routers {
    memory: HostMemory,
    routing: Routing,
    gating: Gating,
    lengths: Vec<usize>,
    documents: Vec<Range<usize>>,
    logits: Vec<HostBuffer>,
}

impl Routers {
    fn of(entry: &Value) -> Self {
        let memory = HostMemory::new(HostOptions::default()).unwrap();
        let size = |key: &str| entry[key].as_u64().unwrap() as usize;
        let lengths: Vec<usize> = numbers(&entry["lengths"]).iter().map(|&length| length as usize).collect();
        let scoring = match entry["scoring"].as_str().unwrap() {
            "softmax" => Scoring::Softmax,
            _ => Scoring::Sigmoid,
        };
        let documents: Vec<_> = entry["documents"].as_array().unwrap().iter().map(numbers).collect();
        let logits = entry["logits"].as_array().unwrap().iter();
        Self {
            routing: Routing::whole(SEQ * lengths.len(), size("experts"), size("top")),
            gating: Gating { scoring, ..Gating::softmax(true) },
            lengths,
            documents: documents.iter().map(|ends| ends[0] as usize..ends[1] as usize).collect(),
            logits: logits.map(|layer| filled(&memory, &numbers(layer))).collect(),
            memory,
        }
    }

    fn run(&self, op: Experts, reads: &[&HostBuffer], writes: &mut [&mut HostBuffer]) {
        let counted_rows = self.lengths.iter().sum();
        let (lengths, documents) = (&self.lengths, &self.documents);
        let batch = BatchFacts { targets: 1, counted_rows, lengths, documents, ..BatchFacts::default() };
        let reads: Vec<_> = reads.iter().map(|buffer| Slice::whole(*buffer)).collect();
        let mut writes: Vec<_> =
            writes.iter_mut().map(|buffer| Write::over(SliceMut::whole(&mut **buffer))).collect();
        let operands = Operands { reads: &reads, writes: &mut writes, batch };
        self.memory.run(&Op::Experts(op), operands).unwrap();
    }

    /// Checks a term, which is at `at` in the load of each mixture.
    fn check(&self, terms: RouterTerms, at: Option<usize>, loss: &Value, gradients: &Value) {
        let (Self { memory, routing, gating, .. }, at) = (self, at.unwrap());
        let zeros = |len| filled(memory, &vec![0.0; len]);
        let (mut sum, mut largest) = (0.0, 0.0_f64);
        for (logits, expected) in self.logits.iter().zip(gradients.as_array().unwrap()) {
            let (mut weights, mut load) = (zeros(routing.slots()), zeros(terms.load_len()));
            let mut routes = memory.allocate(Category::Workspace, DType::U32, routing.slots()).unwrap();
            let op = Experts::Route { routing: *routing, gating: *gating, load: Some(terms) };
            self.run(op, &[logits], &mut [&mut weights, &mut routes, &mut load]);
            sum += read(memory, &load)[at];
            let (mut dlogits, dweights) = (zeros(logits.len()), zeros(routing.slots()));
            let op = Experts::RouteBackward { routing: *routing, gating: *gating, terms: Some(terms) };
            self.run(op, &[logits, &routes, &dweights], &mut [&mut dlogits]);
            let (got, expected) = (read(memory, &dlogits), numbers(expected));
            assert_eq!(got.len(), expected.len());
            for (got, expected) in got.into_iter().zip(expected) {
                assert!((got - expected).abs() <= TOLERANCE, "{got} for {expected}");
                largest = largest.max(got.abs());
            }
        }
        let loss = loss.as_f64().unwrap();
        assert!((sum - loss).abs() <= TOLERANCE * loss, "{sum} for {loss}");
        assert!(largest > 1e-3, "nothing was compared");
    }
}

fn filled(memory: &HostMemory, values: &[f64]) -> HostBuffer {
    let mut buffer = memory.allocate(Category::Workspace, DType::F64, values.len()).unwrap();
    memory.write(Queue::Compute, HostSlice::F64(values), SliceMut::whole(&mut buffer)).unwrap();
    buffer
}

fn read(memory: &HostMemory, buffer: &HostBuffer) -> Vec<f64> {
    let mut values = vec![0.0; buffer.len()];
    memory.read(Queue::Compute, Slice::whole(buffer), HostSliceMut::F64(&mut values)).unwrap();
    values
}

fn entries() -> Vec<Value> {
    let text = std::fs::read_to_string(golden("router_terms.json")).unwrap();
    serde_json::from_str(&text).unwrap()
}

fn terms(routers: &Routers, [z_loss, sequence]: [f64; 2]) -> RouterTerms {
    let (layers, experts) = (routers.logits.len(), routers.routing.experts);
    RouterTerms { layers, experts, balance: 0.0, z_loss, sequence, loss_scale: 1.0 }
}

#[test]
fn z_loss_and_gradients_match_equation() {
    for entry in &entries() {
        let routers = Routers::of(entry);
        let terms = terms(&routers, [1.0, 0.0]);
        routers.check(terms, terms.z_loss_at(), &entry["z_loss"], &entry["z_gradients"]);
    }
}

#[test]
fn sequence_wise_loss_and_gradients_match_equations() {
    for entry in &entries() {
        let routers = Routers::of(entry);
        let terms = terms(&routers, [0.0, 1.0]);
        routers.check(terms, terms.sequence_at(), &entry["sequence_loss"], &entry["sequence_gradients"]);
    }
}

const Z_LOSS: &str = "train.router_z_loss_coef=0.05";
const SEQUENCE_LOSS: &str = "train.router_sequence_loss_coef=0.2";

#[test]
fn terms_have_the_bits_of_the_oracle_on_every_mesh() {
    let whole = [[1, 1, 1, 1], [1, 4, 1, 2], [2, 2, 1, 2]];
    let cut = [[1, 1, 1, 1], [1, 2, 2, 2], [2, 2, 1, 1], [1, 1, 4, 1]];
    let policies: [&[&str]; 4] = [
        &["train.router_aux_loss_coef=0.3", "train.z_loss=0.01"],
        &["fsdp.param_dtype=\"bf16\"", "fsdp.activation_checkpointing=\"full\""],
        &["fsdp.param_dtype=\"f16\"", "train.loss_scale={ init = 256 }", "fsdp.offload=\"cpu\""],
        &["fsdp.activation_checkpointing=\"selective\"", "train.global_batch_size=16"],
    ];
    for (case, policy) in
        ["mixtral-balanced", "qwen3_moe", "deepseek_v3", "gpt_oss"].into_iter().zip(policies)
    {
        check(&model(case), &whole, &[&[Z_LOSS, SEQUENCE_LOSS], policy].concat());
        check(&model(case), &cut, &[&[Z_LOSS], policy].concat());
    }
}

#[test]
fn reported_terms_equal_what_is_added_to_the_loss() {
    let first = |overrides: &[&str]| {
        let (reports, counted) = reports("mixtral-balanced", 2, overrides);
        let (loss, targets) = (reports[0].loss, reports[0].targets as f64);
        (loss, counted.read(&reports[0]), targets)
    };
    let none = "train.router_aux_loss_coef=0.0";
    let (plain, ..) = first(&[none]);
    let both = ["train.router_aux_loss_coef=0.3", "train.z_loss=0.02", Z_LOSS, SEQUENCE_LOSS];
    for more in [&[none, Z_LOSS][..], &[none, SEQUENCE_LOSS], &both] {
        let (loss, parts, targets) = first(more);
        let own = [parts.router_z_loss, parts.router_sequence_loss];
        for (part, key) in own.into_iter().zip([Z_LOSS, SEQUENCE_LOSS]) {
            assert_eq!(part.unwrap() > 1e-3 * targets, more.contains(&key), "{key}");
        }
        let added = own.into_iter().chain([parts.router_loss, parts.z_loss]).flatten().sum::<f64>();
        // Each is a sum of doubles, rounded when it is added and when it is reported.
        assert!((loss - added / targets - plain).abs() < 1e-13 * loss, "{more:?}");
    }
}

/// Documents of packed samples are sequences of their own.
#[test]
fn packed_documents_are_balanced_apart_on_every_mesh() {
    let dir = tempfile::tempdir().unwrap();
    let [data, packing, eos] = packed(dir.path(), 61);
    let settings = [&data, &packing, &eos, SEQUENCE_LOSS, "fsdp.activation_checkpointing=\"full\""];
    check(&model("deepseek_v3"), &[[1, 1, 1, 1], [1, 4, 1, 2], [2, 2, 1, 1]], &settings);
}

#[test]
fn sequence_wise_loss_of_cut_samples_is_refused_by_key() {
    let (dir, model) = (tempfile::tempdir().unwrap(), model("mixtral"));
    let settings =
        ["fsdp.min_num_params=500", "data.seq_len=8", SEQUENCE_LOSS, "fsdp.chunks={ context = 2 }"];
    let architecture = HfConfig::parse(&model).unwrap().build().unwrap();
    let init = Arc::new(architecture.description().init.clone());
    let config = config(dir.path(), 61, &settings);
    let refusal =
        Job::new(config, architecture, InitSource::Random { seed: 0, init }).unwrap_err().to_string();
    for part in ["train.router_sequence_loss_coef", "2 chunks", "fsdp.chunks.context = 1"] {
        assert!(refusal.contains(part), "{refusal}");
    }
}
