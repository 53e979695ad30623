use std::{collections::BTreeMap, path::Path};

use super::*;
use crate::{
    checkpoint::{Checkpoint, Chunk, Key, Object, Region, Role, Source, Tensor, Value, has_model_step, join},
    formats::open,
    safetensors::TensorType,
    transfer::{NoProgress, Options},
};

/// A checkpoint in one `f32` file, made of paths, roles and one-dimensional values.
struct Made {
    _dir: tempfile::TempDir,
    checkpoint: Checkpoint,
}

fn made(tensors: &[(&[&str], Role, &[f32])], values: &[(&[&str], Value)]) -> Made {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("data");
    let (mut bytes, mut checkpoint) = (Vec::new(), Checkpoint::default());
    let path = |steps: &[&str]| steps.iter().map(|step| Key::Name((*step).to_owned())).collect::<Vec<_>>();
    for (steps, role, values) in tensors {
        let (path, offset, len) = (path(steps), bytes.len() as u64, values.len() as u64);
        bytes.extend(values.iter().flat_map(|value| value.to_le_bytes()));
        let chunks = vec![Chunk { region: Region::Flat(0..len), source: 0, offset }];
        let shape = if len == 1 { vec![] } else { vec![len] };
        let tensor = Tensor { path: path.clone(), role: *role, dtype: TensorType::F32, shape, chunks };
        checkpoint.tensors.insert(join(&path), tensor);
    }
    for (steps, value) in values {
        let (path, value) = (path(steps), value.clone());
        checkpoint.values.insert(join(&path), Object { path, role: Role::Optimizer, value });
    }
    checkpoint.path = dir.path().to_owned();
    checkpoint.sources.push(Source::File { path: file.clone(), len: bytes.len() as u64 });
    std::fs::write(&file, bytes).unwrap();
    Made { _dir: dir, checkpoint }
}

fn wanted(name: &str, len: usize, decays: bool) -> Wanted {
    let states = vec![("exp_avg".to_owned(), vec![len])];
    Wanted {
        names: vec![name.to_owned()],
        shape: vec![len],
        states,
        decays,
        may_lack_states: false,
        is_base: false,
    }
}

/// Reads everything that was found, by name.
fn read(found: &Found) -> BTreeMap<String, Vec<f64>> {
    let cancel = std::sync::atomic::AtomicBool::new(false);
    let mut rows = StateRows::new(found, Options::new(&NoProgress, &cancel)).unwrap();
    let names = found.weights.iter().flatten().chain(found.states.iter().flatten().flatten());
    let mut read = |name: &String| {
        let len = usize::try_from(found.checkpoint.tensors[name].len()).unwrap();
        let mut values = vec![0.0; len];
        let row_count = found.checkpoint.tensors[name].shape.first().map_or(1, |&rows| rows as usize);
        rows.read_rows_f64(name, 0..row_count, &mut values).unwrap();
        (name.clone(), values)
    };
    let all = names.map(&mut read).collect();
    rows.finish().unwrap();
    all
}

fn counts(found: &Found) -> Vec<u64> {
    let cancel = std::sync::atomic::AtomicBool::new(false);
    let mut rows = StateRows::new(found, Options::new(&NoProgress, &cancel)).unwrap();
    found.counts.iter().flatten().map(|count| count.read(&mut rows).unwrap()).collect()
}

const A: &[f32] = &[1.0, 2.0];
const B: &[f32] = &[3.0, 4.0, 5.0];

#[test]
fn parameter_is_found_through_prefixes_and_wrappers() {
    let forms: [[&[&str]; 3]; 4] = [
        [&["a.w"], &["optim", "state", "a.w", "exp_avg"], &["optim", "state", "a.w", "step"]],
        [&["model", "a.w"], &["optimizer", "state.a.w.exp_avg"], &["optimizer", "state.a.w.step"]],
        [
            &["model", "_orig_mod.a.w"],
            &["optim", "state", "_orig_mod.a.w", "exp_avg"],
            &["optim", "state", "_orig_mod.a.w", "step"],
        ],
        [
            &["module.a._checkpoint_wrapped_module.w"],
            &["optim.state.module.a._checkpoint_wrapped_module.w.exp_avg"],
            &["optim.state.module.a._checkpoint_wrapped_module.w.step"],
        ],
    ];
    for [weight, moment, step] in forms {
        let tensors = [
            (weight, Role::Model, A),
            (moment, Role::Optimizer, &[6.0, 7.0]),
            (step, Role::Optimizer, &[9.0]),
        ];
        let made = made(&tensors, &[]);
        let found = Found::new(made.checkpoint, &[wanted("a.w", 2, true)]).unwrap();
        let read: Vec<Vec<f64>> = read(&found).into_values().collect();
        assert!(read.contains(&vec![1.0, 2.0]) && read.contains(&vec![6.0, 7.0]), "{weight:?}: {read:?}");
        assert_eq!(counts(&found), [9], "{weight:?}");
        assert_eq!((found.unused.len(), found.is_numbered), (0, false), "{:?}", found.unused);
    }
}

#[test]
fn missing_unexpected_and_misshaped_tensors_are_named() {
    let tensors = [
        (&["model", "a.w"][..], Role::Model, A),
        (&["model", "b.w"], Role::Model, B),
        (&["model", "c.w"], Role::Model, A),
        (&["optim", "state", "a.w", "exp_avg"], Role::Optimizer, B),
    ];
    let made = made(&tensors, &[]);
    let wanted = [wanted("a.w", 2, true), wanted("b.w", 3, true), wanted("d.w", 3, true)];
    let error = Found::new(made.checkpoint, &wanted).unwrap_err().to_string();
    let of = error.split_once("requested model: ").unwrap().1;
    let expected = "3 missing: `model.d.w`, `exp_avg of b.w`, `exp_avg of d.w`; 1 not expected: `model.c.w`; \
                    1 of the wrong shape: `optim.state.a.w.exp_avg` (expected [2], got [3]); check that config and \
                    weights belong together";
    assert_eq!(of, expected);
}

fn lenient(name: &str, len: usize) -> Wanted {
    Wanted { may_lack_states: true, ..wanted(name, len, true) }
}

/// All subsets of the states of three parameters, by name and by number: a parameter either has all of its states, or
/// none of them.
#[test]
fn parameters_without_any_state_are_found_without_state() {
    let names = ["a.w", "b.w", "c.w"];
    let model = names.map(|name| Wanted {
        states: vec![("exp_avg".to_owned(), vec![2]), ("exp_avg_sq".to_owned(), vec![2])],
        ..lenient(name, 2)
    });
    let numbers = Value::List((0..3).map(Value::Int).collect());
    for (is_numbered, held) in
        [false, true].into_iter().flat_map(|by| (1..64_u32).map(move |held| (by, held)))
    {
        let keys = if is_numbered { ["0", "1", "2"] } else { names };
        let paths: Vec<[&str; 4]> = (0..6)
            .filter(|bit| held >> bit & 1 == 1)
            .map(|bit| ["optim", "state", keys[bit / 2], ["exp_avg", "exp_avg_sq"][bit % 2]])
            .collect();
        let weights: Vec<[&str; 2]> = names.map(|name| ["model", name]).into();
        let mut tensors: Vec<(&[&str], Role, &[f32])> =
            weights.iter().map(|path| (&path[..], Role::Model, A)).collect();
        tensors.extend(paths.iter().map(|path| (&path[..], Role::Optimizer, A)));
        let groups: [(&[&str], Value); 1] = [(&["optim", "param_groups", "0", "params"], numbers.clone())];
        let made = made(&tensors, if is_numbered { &groups } else { &[] });
        let counts: Vec<u32> = (0..3).map(|param| (held >> (2 * param) & 3).count_ones()).collect();
        match Found::new(made.checkpoint, &model) {
            Ok(found) => {
                let states: Vec<u32> = found.states.unwrap().iter().map(|all| all.len() as u32).collect();
                assert!(counts == states && !counts.contains(&1), "{counts:?} {states:?}");
            }
            Err(error) => assert!(counts.contains(&1) && error.to_string().contains("missing"), "{error}"),
        }
    }
}

#[test]
fn states_of_unknown_parameters_forbid_absent_states() {
    let tensors = [
        (&["a.w"][..], Role::Model, A),
        (&["b.w"], Role::Model, A),
        (&["optim", "state", "a.w", "exp_avg"], Role::Optimizer, A),
        (&["optim", "state", "other", "exp_avg"], Role::Optimizer, A),
    ];
    let error =
        Found::new(made(&tensors, &[]).checkpoint, &[lenient("a.w", 2), lenient("b.w", 2)]).unwrap_err();
    assert!(error.to_string().contains("1 missing: `exp_avg of b.w`"), "{error}");
    let strict = [wanted("a.w", 2, true), wanted("b.w", 2, true)];
    let error = Found::new(made(&tensors[..3], &[]).checkpoint, &strict).unwrap_err();
    assert!(error.to_string().contains("1 missing: `exp_avg of b.w`"), "{error}");
    // A second name of a parameter is not unknown.
    let tied = Wanted { names: vec!["a.w".into(), "other".into()], ..lenient("a.w", 2) };
    assert!(Found::new(made(&tensors, &[]).checkpoint, &[tied, lenient("b.w", 2)]).is_ok());
}

#[test]
fn numbers_may_count_frozen_parameters() {
    let numbers = Value::List((0..3).map(Value::Int).collect());
    let groups: [(&[&str], Value); 1] = [(&["optim", "param_groups", "0", "params"], numbers)];
    let tensors = [
        (&["a.w"][..], Role::Model, A),
        (&["b.w"], Role::Model, A),
        (&["c.w"], Role::Model, A),
        (&["optim", "state", "2", "exp_avg"], Role::Optimizer, A),
    ];
    let frozen = Wanted { states: Vec::new(), ..wanted("a.w", 2, true) };
    let model = [frozen, lenient("b.w", 2), lenient("c.w", 2)];
    let found = Found::new(made(&tensors, &groups).checkpoint, &model).unwrap();
    assert_eq!(found.states.unwrap(), [vec![], vec![], vec!["optim.state.2.exp_avg".to_owned()]]);
}

#[test]
fn adapters_of_different_ranks_are_refused() {
    let names = ["q", "k"].map(|module| format!("base_model.model.l.{module}.lora_A.default.weight"));
    let mut made =
        made(&[(&[&names[0]], Role::Model, &[0.0; 8]), (&[&names[1]], Role::Model, &[0.0; 4])], &[]);
    for (name, rank) in [(&names[0], 4), (&names[1], 2)] {
        made.checkpoint.tensors.get_mut(name).unwrap().shape = vec![rank, 2];
    }
    for wanted in [wanted("l.q.lora_A.weight", 8, true), wanted("l.q.weight", 8, true)] {
        let error = Found::new(made.checkpoint.clone(), &[wanted]).unwrap_err().to_string();
        let expected =
            format!("have different ranks: 2 in `{}`, 4 in `{}` (PEFT's rank_pattern)", names[1], names[0]);
        assert!(error.contains(&expected), "{error}");
    }
}

#[test]
fn adapters_of_stacked_experts_are_refused() {
    for wrapped in ["experts", "experts.base_layer"] {
        let name = format!("base_model.model.l.mlp.{wrapped}.lora_A.default.weight");
        let made = made(&[(&[&name], Role::Model, &[0.0; 8])], &[]);
        let wanted = wanted("l.mlp.experts.0.down_proj.lora_A.weight", 8, true);
        let error = Found::new(made.checkpoint, &[wanted]).unwrap_err().to_string();
        assert!(error.contains("`l.mlp.experts.lora_A.weight` adapts stacked experts"), "{error}");
    }
}

#[test]
fn extra_state_of_modules_is_not_a_parameter() {
    for extra in ["_extra_state", "_extra_state.amax", "a._extra_state", "a._extra_state.scale.0"] {
        let path = ["model", extra];
        let tensors = [(&["model", "a.w"][..], Role::Model, A), (&path, Role::Model, B)];
        let found = Found::new(made(&tensors, &[]).checkpoint, &[lenient("a.w", 2)]).unwrap();
        assert_eq!(found.unused, [format!("model.{extra}")]);
    }
    let tensors = [(&["model", "a.w"][..], Role::Model, A), (&["model", "a.amax"], Role::Model, B)];
    let error = Found::new(made(&tensors, &[]).checkpoint, &[lenient("a.w", 2)]).unwrap_err();
    assert!(error.to_string().contains("1 not expected: `model.a.amax`"), "{error}");
}

#[test]
fn counts_that_are_no_whole_number_are_refused() {
    let cancel = std::sync::atomic::AtomicBool::new(false);
    for count in [2.5, -1.0, f32::NAN, f32::INFINITY] {
        let tensors = [
            (&["a.w"][..], Role::Model, A),
            (&["optim", "state", "a.w", "exp_avg"], Role::Optimizer, A),
            (&["optim", "state", "a.w", "step"], Role::Optimizer, &[count]),
        ];
        let made = made(&tensors, &[]);
        let found = Found::new(made.checkpoint, &[wanted("a.w", 2, true)]).unwrap();
        let mut rows = StateRows::new(&found, Options::new(&NoProgress, &cancel)).unwrap();
        let error = found.counts[0].as_ref().unwrap().read(&mut rows).unwrap_err().to_string();
        assert!(error.contains("`optim.state.a.w.step` should count steps, but it is"), "{error}");
    }
}

#[test]
fn numbered_states_are_matched_by_order_and_weight_decay() {
    let group = |decay: f64, numbers: &[i64]| {
        let params = numbers.iter().map(|&number| Value::Int(number)).collect();
        [("weight_decay", Value::Float(decay)), ("params", Value::List(params))]
    };
    let groups = [group(0.1, &[0, 1]), group(0.0, &[2])];
    let names = ["0", "1"];
    let paths: Vec<([&str; 4], Value)> = names
        .iter()
        .zip(groups)
        .flat_map(|(name, group)| group.map(|(key, value)| (["optim", "param_groups", name, key], value)))
        .collect();
    let values: Vec<(&[&str], Value)> =
        paths.iter().map(|(path, value)| (&path[..], value.clone())).collect();
    let tensors = [
        (&["a.w"][..], Role::Model, A),
        (&["norm.w"], Role::Model, A),
        (&["z.w"], Role::Model, B),
        (&["optim", "state", "0", "exp_avg"], Role::Optimizer, &[10.0, 11.0]),
        (&["optim", "state", "1", "exp_avg"], Role::Optimizer, &[20.0, 21.0, 22.0]),
        (&["optim", "state", "2", "exp_avg"], Role::Optimizer, &[30.0, 31.0]),
    ];
    let model = [wanted("a.w", 2, true), wanted("norm.w", 2, false), wanted("z.w", 3, true)];
    let found = Found::new(made(&tensors, &values).checkpoint, &model).unwrap();
    let names: Vec<&str> = found.states.iter().flatten().flatten().map(String::as_str).collect();
    assert_eq!(names, ["optim.state.0.exp_avg", "optim.state.2.exp_avg", "optim.state.1.exp_avg"]);
    assert!(found.is_numbered);
    assert_eq!(found.settings[1]["weight_decay"], Value::Float(0.0));
    // Two parameters without decay cannot be matched with one.
    let other = [wanted("a.w", 2, true), wanted("norm.w", 2, false), wanted("z.w", 3, false)];
    let error = Found::new(made(&tensors, &values).checkpoint, &other).unwrap_err().to_string();
    assert!(error.contains("a group has 2 of them where the model has 1"), "{error}");
}

/// Returns what the model of a checkpoint would request from it.
fn model_of(checkpoint: &Checkpoint, decays: impl Fn(&str) -> bool) -> Vec<Wanted> {
    let optimizer = optimizer::Optimizer::of(checkpoint);
    let models = checkpoint.tensors.values().filter(|tensor| tensor.role == Role::Model);
    let wanted = models.map(|tensor| {
        let name = join(&tensor.path[usize::from(has_model_step(&tensor.path))..]);
        let shape: Vec<usize> = tensor.shape.iter().map(|&size| size as usize).collect();
        // Buffers have no optimizer state.
        let is_trained = optimizer.is_numbered() || optimizer.states.contains_key(&name);
        let states = ["exp_avg", "exp_avg_sq"].map(|state| (state.to_owned(), shape.clone()));
        let states = if is_trained { states.into() } else { Vec::new() };
        Wanted {
            decays: decays(&name),
            names: vec![name],
            shape,
            states,
            may_lack_states: true,
            is_base: false,
        }
    });
    wanted.collect()
}

#[test]
fn foreign_formats_provide_weights_states_and_steps() {
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures");
    for (path, steps) in [
        ("xla_fsdp_2rank/trained_rank-00000000-of-00000002.pth", 2),
        ("deepspeed_layout/zero2", 5),
        ("deepspeed_layout/zero3", 5),
        ("dcp_2rank_zstd", 2),
        ("dcp_hsdp_2x2", 2),
        ("full.pth", 2),
        ("fsdp1_ranks/dtensor", 1),
        ("fsdp1_ranks/sharded_tensor", 1),
    ] {
        let mut checkpoint = open(fixtures.join(path)).unwrap();
        // None of these models has an integer buffer.
        checkpoint.tensors.retain(|_, tensor| tensor.dtype.is_convertible());
        let wanted = model_of(&checkpoint, |_| true);
        let found = Found::new(checkpoint, &wanted).unwrap();
        let trained = wanted.iter().filter(|one| !one.states.is_empty()).count();
        assert!(trained > 0, "{path}");
        assert_eq!(counts(&found), vec![steps; trained], "{path}");
        // All elements are read, and all checksums match.
        assert_eq!(read(&found).len(), wanted.len() + 2 * trained, "{path}");
    }
}

#[test]
fn trainer_checkpoints_match_in_memory_values() {
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures");
    let open = |path: &str| open(fixtures.join(path)).unwrap();
    let values = |found: &Found| -> Vec<Vec<f64>> {
        let read = read(found);
        let names = found.weights.iter().flatten().chain(found.states.iter().flatten().flatten());
        names.map(|name| read[name].clone()).collect()
    };
    for (path, held, model, steps) in [
        ("fsdp2/dcp", "fsdp2/expected", LLAMA, 10),
        ("fsdp2/dcp_flat", "fsdp2/expected", LLAMA, 10),
        ("accelerate/fsdp2_sharded", "accelerate/fsdp2_sharded.expected", LLAMA, 10),
        ("accelerate/fsdp2_full", "accelerate/fsdp2_full.expected", LLAMA, 10),
        ("accelerate/ddp", "accelerate/ddp.expected", LLAMA, 10),
        ("trainer/single/checkpoint-10", "trainer/single.expected", LLAMA, 10),
        ("trainer/fsdp2/checkpoint-10", "trainer/fsdp2.expected", LLAMA, 10),
        ("torchtitan/step-10", "torchtitan/expected", LLAMA, 10),
        ("verl/actor", "verl/expected", LLAMA, 10),
        ("lightning/checkpoints/step=10.ckpt", "lightning/expected", LLAMA, 10),
        ("xla_fsdp", "fsdp2/expected", LLAMA, 10),
        ("deepspeed/zero0", "deepspeed/zero0.expected", LLAMA, 10),
        ("deepspeed/zero0_bf16", "deepspeed/zero0_bf16.expected", LLAMA, 11),
        ("deepspeed/zero1", "deepspeed/zero1.expected", LLAMA, 10),
        ("deepspeed/zero2", "deepspeed/zero2.expected", LLAMA, 10),
        ("deepspeed/zero3", "deepspeed/zero3.expected", LLAMA, 10),
        (TIED, "deepspeed/zero1_bf16_tied_frozen.expected", TIED, 10),
        ("deepspeed/zero2_bf16_tied_frozen", "deepspeed/zero2_bf16_tied_frozen.expected", TIED, 10),
        ("deepspeed/zero3_bf16_tied_frozen", "deepspeed/zero3_bf16_tied_frozen.expected", TIED, 10),
        (SMALL, "optimizers/before_1_6.expected", SMALL, 1),
        ("optimizers/before_1_6.pt", "optimizers/before_1_6.expected", SMALL, 1),
        (TENSOR_PARALLEL, "optimizers/tp_fsdp2.expected", TENSOR_PARALLEL, 1),
    ] {
        let model = in_order(model_of(&open(model), |name| !name.contains("norm")));
        let found = Found::new(open(path), &model).unwrap();
        let held = Found::new(open(&format!("{held}.safetensors")), &model).unwrap();
        assert!(values(&found) == values(&held), "{path}");
        let trained = model.iter().filter(|one| !one.states.is_empty()).count();
        assert_eq!(counts(&found), vec![steps; trained], "{path}");
        let with_settings = found.settings.iter().filter(|settings| settings.contains_key("lr"));
        assert_eq!(with_settings.count(), trained, "{path}");
    }
}

/// Checkpoints with the names and shapes of a model: the Llama used by most, one with tied embeddings and a frozen
/// projection, one of two linear layers, and one of two layers that are split by columns and by rows.
const LLAMA: &str = "fsdp2/dcp";
const TIED: &str = "deepspeed/zero1_bf16_tied_frozen";
const SMALL: &str = "optimizers/fsdp1_dcp";
const TENSOR_PARALLEL: &str = "optimizers/tp_fsdp2";

/// Sorts parameters into the order of their model.
fn in_order(mut model: Vec<Wanted>) -> Vec<Wanted> {
    let parts = [
        "0.weight",
        "0.bias",
        "1.weight",
        "embed",
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate",
        "up_proj",
        "down",
        "layernorm",
        "norm",
        "lm_head",
    ];
    model.sort_by_key(|one| parts.iter().position(|part| one.names[0].contains(part)));
    model
}

#[test]
fn fsdp2_checkpoint_has_no_unused_entries() {
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/fsdp2");
    for layout in ["dcp", "dcp_flat"] {
        let checkpoint = open(fixtures.join(layout)).unwrap();
        let model = model_of(&open(fixtures.join("dcp")).unwrap(), |_| true);
        let found = Found::new(checkpoint, &model).unwrap();
        assert!(found.unused.is_empty(), "{layout}: {:?}", found.unused);
    }
}

/// Folders of accelerate have the states of several optimizers under keys of their own.
#[test]
fn states_of_several_optimizers_are_joined_by_name() {
    let group = |decay: f64, name: &str| {
        let params = Value::List(vec![Value::Str(name.to_owned())]);
        [("params", params), ("weight_decay", Value::Float(decay))]
    };
    let [first, second] = [group(0.1, "a.w"), group(0.0, "b.w")];
    let of = |key: &'static str| ["optimizer", "param_groups", "0", key];
    let under = |key: &'static str| ["optimizer_1", "optimizer", "param_groups", "0", key];
    let firsts = first.map(|(key, value)| (of(key), value));
    let seconds = second.map(|(key, value)| (under(key), value));
    let mut values: Vec<(&[&str], Value)> =
        firsts.iter().map(|(path, value)| (&path[..], value.clone())).collect();
    values.extend(seconds.iter().map(|(path, value)| (&path[..], value.clone())));
    let tensors = [
        (&["a.w"][..], Role::Model, A),
        (&["b.w"], Role::Model, B),
        (&["optimizer", "state", "a.w", "exp_avg"], Role::Optimizer, &[10.0, 11.0]),
        (&["optimizer", "state", "a.w", "step"], Role::Optimizer, &[4.0]),
        (&["optimizer_1", "optimizer", "state", "b.w", "exp_avg"], Role::Optimizer, &[20.0, 21.0, 22.0]),
        (&["optimizer_1", "optimizer", "state", "b.w", "step"], Role::Optimizer, &[3.0]),
    ];
    let model = [wanted("a.w", 2, true), wanted("b.w", 3, false)];
    let made = made(&tensors, &values);
    let found = Found::new(made.checkpoint, &model).unwrap();
    assert_eq!(counts(&found), [4, 3]);
    assert_eq!(read(&found)["optimizer_1.optimizer.state.b.w.exp_avg"], [20.0, 21.0, 22.0]);
    let decays: Vec<&Value> = found.settings.iter().map(|settings| &settings["weight_decay"]).collect();
    assert_eq!(decays, [&Value::Float(0.1), &Value::Float(0.0)]);
    assert!(found.unused.is_empty(), "{:?}", found.unused);
}
