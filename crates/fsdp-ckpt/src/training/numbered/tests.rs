//! Numbered states of modules with experts: whatever is trained, numbered and absent, every parameter gets its own
//! moments.

use proptest::prelude::*;

use super::*;
use crate::{
    checkpoint::{Chunk, Object, Region, Source, Tensor},
    safetensors::TensorType,
    training::{Found, StateRows},
    transfer::{NoProgress, Options},
};

const EXPERTS: usize = 2;
const HIDDEN: usize = 2;
const INNER: usize = 3;

/// How a module holds its experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Form {
    RouterFirst,
    RouterLast,
    Separate,
}

/// A parameter of the module: its name, its shape and, for each part that is a parameter here, name, first element and
/// number of elements.
type InModule = (String, Vec<usize>, Vec<(String, usize, usize)>);

fn whole(name: &str, shape: &[usize]) -> InModule {
    let len = shape.iter().product();
    (name.to_owned(), shape.to_vec(), vec![(name.to_owned(), 0, len)])
}

/// The mixture of a layer, in the order of the module.
fn mixture(layer: usize, form: Form, is_mixtral: bool) -> Vec<InModule> {
    let (mlp, words) = match is_mixtral {
        true => ("block_sparse_moe", ["w1", "w3", "w2"]),
        false => ("mlp", ["gate_proj", "up_proj", "down_proj"]),
    };
    let router = whole(&format!("l.{layer}.{mlp}.gate.weight"), &[EXPERTS, HIDDEN]);
    let name = |expert: usize, word: &str| format!("l.{layer}.{mlp}.experts.{expert}.{word}.weight");
    let size = INNER * HIDDEN;
    if form == Form::Separate {
        let order = if is_mixtral { [0, 2, 1] } else { [0, 1, 2] };
        let shapes = [[INNER, HIDDEN], [INNER, HIDDEN], [HIDDEN, INNER]];
        let experts =
            (0..EXPERTS).flat_map(|expert| order.map(|word| (name(expert, words[word]), shapes[word])));
        return std::iter::once(router).chain(experts.map(|(name, shape)| whole(&name, &shape))).collect();
    }
    let gate_up = (0..EXPERTS).flat_map(|expert| {
        [
            (name(expert, words[0]), 2 * expert * size, size),
            (name(expert, words[1]), (2 * expert + 1) * size, size),
        ]
    });
    let down = (0..EXPERTS).map(|expert| (name(expert, words[2]), expert * size, size));
    let stacks = [
        (format!("l.{layer}.mlp.experts.gate_up_proj"), vec![EXPERTS, 2 * INNER, HIDDEN], gate_up.collect()),
        (format!("l.{layer}.mlp.experts.down_proj"), vec![EXPERTS, HIDDEN, INNER], down.collect()),
    ];
    match form {
        Form::RouterFirst => std::iter::once(router).chain(stacks).collect(),
        _ => stacks.into_iter().chain([router]).collect(),
    }
}

fn in_module(form: Form, is_mixtral: bool) -> Vec<InModule> {
    let mut all = vec![whole("embed.weight", &[5, HIDDEN])];
    for layer in 0..2 {
        all.push(whole(&format!("l.{layer}.q.weight"), &[HIDDEN, HIDDEN]));
        all.extend(mixture(layer, form, is_mixtral));
        all.push(whole(&format!("l.{layer}.norm.weight"), &[HIDDEN]));
    }
    all
}

/// What of a model is trained, by a part of names.
const FROZEN: [&str; 5] = ["nothing", ".experts.", ".gate.", "norm", "embed"];

/// A checkpoint with numbered states: the moments of parameter `k` of the module are `1000 k + element`.
struct Made {
    checkpoint: Checkpoint,
    _dir: tempfile::TempDir,
}

fn made(
    module: &[InModule],
    weights: &[InModule],
    frozen: &str,
    (numbers_all, groups): (bool, usize),
    absent: &[bool],
) -> Made {
    let dir = tempfile::tempdir().unwrap();
    let mut checkpoint = Checkpoint { path: dir.path().to_owned(), ..Checkpoint::default() };
    let mut bytes: Vec<u8> = Vec::new();
    let mut add = |path: &[&str], role: Role, shape: &[usize], first: f32| {
        let path: Vec<Key> = path.iter().map(|step| Key::Name((*step).to_owned())).collect();
        let len = shape.iter().product::<usize>();
        let chunk = Chunk { region: Region::Flat(0..len as u64), source: 0, offset: bytes.len() as u64 };
        bytes.extend((0..len).flat_map(|at| (first + at as f32).to_le_bytes()));
        let shape = shape.iter().map(|&size| size as u64).collect();
        let tensor = Tensor { path, role, dtype: TensorType::F32, shape, chunks: vec![chunk] };
        checkpoint.tensors.insert(join(&tensor.path), tensor);
    };
    for (name, shape, _) in weights {
        add(&["model", name], Role::Model, shape, 0.0);
    }
    let mut number = 0;
    let mut lists = Vec::new();
    for decays in if groups == 1 { vec![None] } else { vec![Some(true), Some(false)] } {
        let mut members = Vec::new();
        for (index, (name, shape, _)) in module.iter().enumerate() {
            let is_frozen = name.contains(frozen);
            if decays.is_some_and(|decays| decays == name.contains("norm")) || (is_frozen && !numbers_all) {
                continue;
            }
            if !is_frozen && !absent[index % absent.len()] {
                let text = number.to_string();
                add(&["optim", "state", &text, "exp_avg"], Role::Optimizer, shape, 1000.0 * index as f32);
            }
            members.push(Value::Int(number));
            number += 1;
        }
        let decay = if decays == Some(false) { 0.0 } else { 0.1 };
        lists.push([("params", Value::List(members)), ("weight_decay", Value::Float(decay))]);
    }
    for (group, list) in lists.into_iter().enumerate() {
        for (key, value) in list {
            let path =
                ["optim", "param_groups", &group.to_string(), key].map(|step| Key::Name(step.to_owned()));
            let (path, role) = (path.to_vec(), Role::Optimizer);
            checkpoint.values.insert(join(&path), Object { path, role, value });
        }
    }
    let file = dir.path().join("data");
    checkpoint.sources.push(Source::File { path: file.clone(), len: bytes.len() as u64 });
    std::fs::write(file, bytes).unwrap();
    Made { checkpoint, _dir: dir }
}

/// The parameters to look for, in the order of the models here: gate, up and down projection of each expert.
fn wanted(is_mixtral: bool, frozen: &str) -> Vec<Wanted> {
    let mut all = in_module(Form::Separate, is_mixtral);
    if is_mixtral {
        for index in 0..all.len() - 1 {
            if all[index].0.ends_with("w2.weight") && all[index + 1].0.ends_with("w3.weight") {
                all.swap(index, index + 1);
            }
        }
    }
    let of = |(name, shape, _): InModule| {
        let is_trained = !name.contains(frozen);
        let states = if is_trained { vec![("exp_avg".to_owned(), shape.clone())] } else { Vec::new() };
        let decays = !name.contains("norm");
        Wanted { names: vec![name], shape, states, decays, may_lack_states: true, is_base: false }
    };
    all.into_iter().map(of).collect()
}

proptest! {
    #[test]
    fn moments_of_experts_are_found_by_number(
        form in prop::sample::select(vec![Form::RouterFirst, Form::RouterLast, Form::Separate]),
        is_mixtral: bool,
        holds_stacks: bool,
        frozen in prop::sample::select(FROZEN.to_vec()),
        numbers_all: bool,
        groups in 1..=2_usize,
        absent in prop::collection::vec(prop::bool::weighted(0.2), 1..9),
    ) {
        let module = in_module(form, is_mixtral);
        let weights = in_module(if holds_stacks { Form::RouterFirst } else { Form::Separate }, is_mixtral);
        // A frozen tensor beside states of nothing is not an optimizer.
        prop_assume!(!absent.iter().all(|&is_absent| is_absent));
        let made = made(&module, &weights, frozen, (numbers_all, groups), &absent);
        let has_states = made.checkpoint.tensors.keys().any(|name| name.starts_with("optim"));
        prop_assume!(has_states);
        let wanted = wanted(is_mixtral, frozen);
        let found = Found::new(made.checkpoint, &wanted).unwrap();
        prop_assert!(found.is_numbered);
        let cancel = std::sync::atomic::AtomicBool::new(false);
        let mut rows = StateRows::new(&found, Options::new(&NoProgress, &cancel)).unwrap();
        for (parameter, states) in wanted.iter().zip(found.states.as_ref().unwrap()) {
            let name = &parameter.names[0];
            let held = module.iter().enumerate().find_map(|(index, (_, _, parts))| {
                Some((index, parts.iter().find(|part| part.0 == *name)?))
            });
            let (index, (_, first, len)) = held.unwrap();
            let has_state = !parameter.states.is_empty() && !absent[index % absent.len()];
            prop_assert_eq!(states.len(), usize::from(has_state), "{}", name);
            if has_state {
                let mut values = vec![0.0; *len];
                rows.read_rows_f64(&states[0], 0..parameter.shape[0], &mut values).unwrap();
                let expected: Vec<f64> = (0..*len).map(|at| (1000 * index + first + at) as f64).collect();
                prop_assert_eq!(values, expected, "{}", name);
            }
        }
    }
}
