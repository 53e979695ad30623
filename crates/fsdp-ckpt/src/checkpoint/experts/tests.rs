//! Both forms place every element where the other one does, and names and settings follow.

use proptest::prelude::*;

use super::*;
use crate::{
    checkpoint::{Chunk, Object, Region, Value},
    safetensors::TensorType,
};

/// Where an element is stored: the only chunk that has it, and the offset there.
fn place(tensor: &Tensor, index: &[u64]) -> (usize, u64) {
    let flat = index.iter().zip(&tensor.shape).fold(0, |flat, (i, size)| flat * size + i);
    let size = tensor.dtype.size_bytes() as u64;
    let found: Vec<(usize, u64)> = tensor
        .chunks
        .iter()
        .filter_map(|chunk| match &chunk.region {
            Region::Flat(range) => {
                let at = range.contains(&flat).then(|| flat - range.start)?;
                Some((chunk.source, chunk.offset + at * size))
            }
            Region::Box { offsets, sizes, strides } => {
                let inner = index.iter().zip(offsets).map(|(i, offset)| i.checked_sub(*offset));
                let inner: Vec<u64> = inner.collect::<Option<_>>()?;
                let is_inside = inner.iter().zip(sizes).all(|(i, size)| i < size);
                let at: u64 = inner.iter().zip(strides).map(|(i, stride)| i * stride).sum();
                is_inside.then_some((chunk.source, chunk.offset + at * size))
            }
        })
        .collect();
    assert_eq!(found.len(), 1, "{index:?} of {tensor:?}");
    found[0]
}

/// The module of experts, and the names of gate, up and down projection.
fn words(names: ExpertNames) -> (&'static str, [&'static str; 3]) {
    let [gate_up, _, down, _] = names.words();
    (names.module(), [gate_up[0], gate_up[1], down[0]])
}

/// Cuts a stack into chunks: flat ranges, or boxes between cuts of each dimension, in their own strides. A stack of biases
/// has one row per expert, and no dimension of rows.
fn stack([experts, rows, columns]: [u64; 3], cuts: &[u64; 3], is_flat: bool, name: &str) -> Tensor {
    let shape = [experts, rows, columns];
    let kept = |all: [u64; 3]| -> Vec<u64> {
        (0..3).filter(|&dim| dim != 1 || !name.ends_with("_bias")).map(|dim| all[dim]).collect()
    };
    let stacked = kept([experts, rows, columns]);
    let mut chunks = Vec::new();
    let len = experts * rows * columns;
    if is_flat {
        let ends = [0, cuts[0] % (len + 1), len];
        let ranges = ends.windows(2).enumerate();
        chunks.extend(ranges.map(|(source, pair)| Chunk {
            region: Region::Flat(pair[0]..pair[1]),
            source,
            offset: 7 + source as u64,
        }));
    } else {
        let parts = |size: u64, cut: u64| {
            let cut = cut % (size + 1);
            [0..cut, cut..size].into_iter().filter(|part| !part.is_empty()).collect::<Vec<_>>()
        };
        let each = |dim: usize| parts(shape[dim], cuts[dim]);
        let pairs = each(0).into_iter().flat_map(|a| each(1).into_iter().map(move |b| (a.clone(), b)));
        let pairs: Vec<_> = pairs.collect();
        for (pair, c) in pairs.iter().flat_map(|pair| each(2).into_iter().map(move |c| (pair, c))) {
            let (a, b) = pair;
            let region = Region::Box {
                offsets: kept([a.start, b.start, c.start]),
                sizes: kept([a.end - a.start, b.end - b.start, c.end - c.start]),
                // Transposed in the source.
                strides: kept([1000, 3, 100]),
            };
            let source = chunks.len();
            chunks.push(Chunk { region: region.simplified(&stacked), source, offset: 50 + source as u64 });
        }
    }
    let path = vec![Key::Name("model".into()), Key::Name(name.into())];
    Tensor { path, role: Role::Model, dtype: TensorType::F32, shape: stacked, chunks }
}

fn checkpoint(tensors: impl IntoIterator<Item = Tensor>) -> Checkpoint {
    let tensors = tensors.into_iter().map(|tensor| (join(&tensor.path), tensor)).collect();
    Checkpoint { tensors, ..Checkpoint::default() }
}

proptest! {
    #[test]
    fn every_element_of_stack_with_biases_keeps_its_place(
        (experts, inner, hidden) in (1_u64..4, 2_u64..4, 2_u64..4),
        cuts in prop::array::uniform3(0_u64..60),
        is_flat in any::<bool>(),
    ) {
        let sizes = [[hidden, 2 * inner], [1, 2 * inner], [inner, hidden], [1, hidden]];
        let stacks = STACKS.iter().zip(sizes).map(|(name, [rows, columns])| {
            stack([experts, rows, columns], &cuts, is_flat, &format!("l.0.mlp.experts.{name}"))
        });
        let fused = checkpoint(stacks);
        let separate = fused.clone().with_experts(Experts::Separate(ExpertNames::GptOss)).unwrap();
        prop_assert_eq!(separate.tensors.len() as u64, 4 * experts);
        for (expert, name) in (0..experts).flat_map(|expert| STACKS.map(|name| (expert, name))) {
            let part = &separate.tensors[&format!("model.l.0.mlp.experts.{expert}.{name}")];
            let of = &fused.tensors[&format!("model.l.0.mlp.experts.{name}")];
            prop_assert_eq!(&part.shape[..], &of.shape[1..]);
            for at in 0..part.len() {
                let width = part.shape[part.shape.len() - 1];
                let index = if part.shape.len() == 1 { vec![at] } else { vec![at / width, at % width] };
                prop_assert_eq!(place(part, &index), place(of, &[&[expert], &index[..]].concat()));
            }
            let stack = format!("l.0.mlp.experts.{name}");
            let published = StackPlace { stack, place: expert, slots: 1 };
            prop_assert_eq!(published_stack(&format!("l.0.mlp.experts.{expert}.{name}")), Some(published));
        }
        let again = separate.with_experts(Experts::Fused).unwrap();
        prop_assert_eq!(again.tensors.keys().collect::<Vec<_>>(), fused.tensors.keys().collect::<Vec<_>>());
        for (name, tensor) in &fused.tensors {
            prop_assert_eq!(&again.tensors[name].shape, &tensor.shape);
            for at in 0..tensor.len() {
                let (mut rest, mut index) = (at, vec![0; tensor.shape.len()]);
                for dim in (0..index.len()).rev() {
                    (index[dim], rest) = (rest % tensor.shape[dim], rest / tensor.shape[dim]);
                }
                prop_assert_eq!(place(&again.tensors[name], &index), place(tensor, &index));
            }
        }
    }

    #[test]
    fn every_element_of_stack_keeps_its_place(
        (experts, inner, hidden) in (1_u64..4, 1_u64..4, 1_u64..4),
        cuts in prop::array::uniform3(0_u64..60),
        is_flat in any::<bool>(),
        names in prop::sample::select(vec![ExpertNames::Mixtral, ExpertNames::Qwen, ExpertNames::Granite]),
    ) {
        let (mlp, [gate, up, down]) = words(names);
        let [of_gate_up, of_down] = match names {
            ExpertNames::Granite => GRANITE_STACKS.map(|(name, _)| format!("l.0.{name}")),
            _ => ["gate_up_proj", "down_proj"].map(|name| format!("l.0.mlp.experts.{name}")),
        };
        let gate_up = stack([experts, 2 * inner, hidden], &cuts, is_flat, &of_gate_up);
        let downs = stack([experts, hidden, inner], &cuts, is_flat, &of_down);
        let fused = checkpoint([gate_up.clone(), downs.clone()]);
        let separate = fused.clone().with_experts(Experts::Separate(names)).unwrap();
        prop_assert_eq!(separate.tensors.len() as u64, 3 * experts);
        for expert in 0..experts {
            for (word, of, first) in [(gate, &gate_up, 0), (up, &gate_up, inner), (down, &downs, 0)] {
                let part = &separate.tensors[&format!("model.l.0.{mlp}.experts.{expert}.{word}")];
                let [rows, columns] = part.shape[..] else { panic!("a matrix") };
                for (row, column) in (0..rows).flat_map(|row| (0..columns).map(move |column| (row, column))) {
                    prop_assert_eq!(place(part, &[row, column]), place(of, &[expert, first + row, column]));
                }
            }
        }
        // The way back: the same elements in the same places, though perhaps in more chunks.
        let again = separate.with_experts(Experts::Fused).unwrap();
        prop_assert_eq!(again.tensors.keys().collect::<Vec<_>>(), fused.tensors.keys().collect::<Vec<_>>());
        for (name, tensor) in &fused.tensors {
            prop_assert_eq!(&again.tensors[name].shape, &tensor.shape);
            let [experts, rows, columns] = tensor.shape[..] else { panic!("a stack") };
            for at in 0..experts * rows * columns {
                let index = [at / (rows * columns), at / columns % rows, at % columns];
                prop_assert_eq!(place(&again.tensors[name], &index), place(tensor, &index));
            }
        }
    }
}

/// A checkpoint of a layer with a router, moments and step counts, and the settings of a group.
fn of_layer(names: &[(&str, &[u64])]) -> Checkpoint {
    let tensor = |path: Vec<Key>, role: Role, shape: &[u64]| {
        let chunks = vec![Chunk { region: Region::Flat(0..shape.iter().product()), source: 0, offset: 0 }];
        Tensor { path, role, dtype: TensorType::F32, shape: shape.to_vec(), chunks }
    };
    let mut tensors = Vec::new();
    for (name, shape) in names {
        let steps = |steps: &[&str]| steps.iter().map(|step| Key::Name((*step).to_owned())).collect();
        tensors.push(tensor(steps(&["model", name]), Role::Model, shape));
        tensors.push(tensor(steps(&["optim", "state", name, "exp_avg"]), Role::Optimizer, shape));
        tensors.push(tensor(steps(&["optim", &format!("state.{name}.step")]), Role::Optimizer, &[]));
    }
    let mut made = checkpoint(tensors);
    let path = ["optim", "param_groups", "0", "params"].map(|step| Key::Name(step.to_owned())).to_vec();
    let params = names.iter().map(|(name, _)| Value::Str((*name).to_owned())).collect();
    let object = Object { path: path.clone(), role: Role::Optimizer, value: Value::List(params) };
    made.values.insert(join(&path), object);
    made
}

#[test]
fn names_states_and_groups_follow_the_form() {
    let fused: [(&str, &[u64]); 5] = [
        ("l.0.mlp.gate.weight", &[2, 4]),
        ("l.0.mlp.experts.gate_up_proj", &[2, 6, 4]),
        ("l.0.mlp.experts.down_proj", &[2, 4, 3]),
        ("l.0.mlp.bias", &[2]),
        // A layer without experts.
        ("l.1.mlp.up_proj.weight", &[2]),
    ];
    for names in [ExpertNames::Mixtral, ExpertNames::Qwen] {
        let (mlp, [gate, up, down]) = words(names);
        let weight = |expert: u64, word: &str| format!("l.0.{mlp}.experts.{expert}.{word}");
        let mut separate = vec![format!("l.0.{mlp}.gate.weight")];
        separate.extend((0..2).flat_map(|expert| [weight(expert, gate), weight(expert, up)]));
        separate.extend((0..2).map(|expert| weight(expert, down)));
        separate.extend([format!("l.0.{mlp}.bias"), "l.1.mlp.up_proj.weight".to_owned()]);
        let shape = |name: &str| -> &[u64] {
            match name {
                name if name.contains(down) => &[4, 3],
                name if name.contains(".experts.") => &[3, 4],
                name if name.contains(".gate.") => &[2, 4],
                _ => &[2],
            }
        };
        let expected: Vec<(&str, &[u64])> = separate.iter().map(|name| (&name[..], shape(name))).collect();
        let shapes = |checkpoint: &Checkpoint| -> Vec<(String, Vec<u64>)> {
            checkpoint.tensors.iter().map(|(name, tensor)| (name.clone(), tensor.shape.clone())).collect()
        };
        let (fused, expected) = (of_layer(&fused), of_layer(&expected));
        let got = fused.clone().with_experts(Experts::Separate(names)).unwrap();
        assert_eq!((shapes(&got), &got.values), (shapes(&expected), &expected.values), "{names:?}");
        let again = expected.with_experts(Experts::Fused).unwrap();
        assert_eq!((shapes(&again), &again.values), (shapes(&fused), &fused.values), "{names:?}");
    }
}

/// Files of Granite have their own names of stacks and router, and so has what is made of memory.
#[test]
fn both_forms_of_granite_are_read_and_that_of_files_is_written() {
    let mlp = "l.0.block_sparse_moe";
    let stacks: [&[u64]; 2] = [&[2, 6, 4], &[2, 4, 3]];
    let all = |router: &str, names: [&str; 2]| {
        let names = [router, names[0], names[1]].map(|name| format!("{mlp}.{name}"));
        let shapes = [&[2, 4][..], stacks[0], stacks[1]];
        of_layer(&names.iter().map(|name| &name[..]).zip(shapes).collect::<Vec<_>>())
    };
    let memory = all("router.weight", ["experts.gate_up_proj", "experts.down_proj"]);
    let files = all("router.layer.weight", ["input_linear.weight", "output_linear.weight"]);
    let form = Experts::Separate(ExpertNames::Granite);
    let [from_memory, from_files] = [memory, files.clone()].map(|one| one.with_experts(form).unwrap());
    assert_eq!((&from_memory.tensors, &from_memory.values), (&from_files.tensors, &from_files.values));
    assert!(from_files.tensors.contains_key(&format!("model.{mlp}.experts.1.up_proj.weight")));
    let again = from_files.with_experts(Experts::Fused).unwrap();
    assert_eq!(
        (again.tensors.keys().collect::<Vec<_>>(), &again.values),
        (files.tensors.keys().collect(), &files.values)
    );
    assert_eq!(files.clone().with_experts(Experts::Fused).unwrap().tensors, files.tensors);
    let up = published_stack(&format!("{mlp}.experts.1.up_proj.weight")).unwrap();
    assert_eq!(up, StackPlace { stack: format!("{mlp}.input_linear.weight"), place: 3, slots: 2 });
}

/// As transformers calls the parameters of its modules, which PEFT adapts.
#[test]
fn stacks_in_memory_are_called_as_in_transformers() {
    let stack = |name: &str| stack_in_memory(name).map(|place| (place.stack, place.place, place.slots));
    for (name, in_memory, place, slots) in [
        ("l.0.mlp.experts.3.up_proj.weight", "l.0.mlp.experts.gate_up_proj", 7, 2),
        ("l.0.block_sparse_moe.experts.3.w1.weight", "l.0.mlp.experts.gate_up_proj", 6, 2),
        ("l.0.block_sparse_moe.experts.3.w2.weight", "l.0.mlp.experts.down_proj", 3, 1),
        ("l.0.mlp.experts.3.gate_up_proj", "l.0.mlp.experts.gate_up_proj", 3, 1),
        ("l.0.block_sparse_moe.experts.3.up_proj.weight", "l.0.block_sparse_moe.experts.gate_up_proj", 7, 2),
    ] {
        assert_eq!(stack(name), Some((in_memory.to_owned(), place, slots)), "{name}");
    }
    assert_eq!(stack("l.0.mlp.shared_experts.up_proj.weight"), None);
}

#[test]
fn incomplete_and_doubled_experts_are_refused() {
    let text = |names: &[(&str, &[u64])], form| of_layer(names).with_experts(form).unwrap_err().to_string();
    let (one, two) = ("mlp.experts.0.down_proj.weight", "mlp.experts.2.down_proj.weight");
    let lacking = text(&[(one, &[2, 3]), (two, &[2, 3])], Experts::Fused);
    assert!(lacking.contains("expert 1 lacks its part of `model.mlp.experts.down_proj`"), "{lacking}");
    let two = "mlp.experts.1.down_proj.weight";
    let differing = text(&[(one, &[2, 3]), (two, &[3, 2])], Experts::Fused);
    assert!(differing.contains("differ in shape or dtype"), "{differing}");
    let both =
        text(&[(one, &[2, 3]), ("mlp.experts.down_proj", &[1, 2, 3])], Experts::Separate(ExpertNames::Qwen));
    assert!(both.contains("in both forms"), "{both}");
}

/// The layer of one expert beside that of another, by the states that a stack cannot hold.
fn of_experts(change: impl Fn(&mut Checkpoint)) -> Result<Checkpoint, Error> {
    let weights = ["mlp.experts.0.down_proj.weight", "mlp.experts.1.down_proj.weight"];
    let mut layer = of_layer(&weights.map(|name| (name, &[2, 3][..])));
    change(&mut layer);
    layer.with_experts(Experts::Fused)
}

#[test]
fn states_that_a_stack_cannot_hold_are_refused() {
    assert!(of_experts(|_| {}).is_ok());
    let refused = |change: &dyn Fn(&mut Checkpoint)| of_experts(change).unwrap_err().to_string();
    let name =
        |expert: u64, state: &str| format!("optim.state.mlp.experts.{expert}.down_proj.weight.{state}");
    // The last expert has no moments: the stack would have one expert less than the weights.
    for (expert, state) in [(1, "exp_avg"), (0, "exp_avg"), (1, "step"), (0, "step")] {
        let lacking = refused(&|layer| drop(layer.tensors.remove(&name(expert, state)).unwrap()));
        assert!(
            lacking.contains(&format!("expert {expert} lacks its part of `optim.state.mlp")),
            "{lacking}"
        );
    }
    let rows = refused(&|layer| {
        for expert in 0..2 {
            layer.tensors.get_mut(&name(expert, "exp_avg")).unwrap().shape = vec![2];
        }
    });
    assert!(rows.contains("neither one value nor of the shape of a weight"), "{rows}");
    let group = |layer: &mut Checkpoint, number: &str, member: u64| {
        let path =
            ["optim", "param_groups", number, "params"].map(|step| Key::Name(step.to_owned())).to_vec();
        let member = Value::Str(format!("mlp.experts.{member}.down_proj.weight"));
        let object = Object { path: path.clone(), role: Role::Optimizer, value: Value::List(vec![member]) };
        layer.values.insert(join(&path), object);
    };
    let groups = refused(&|layer| {
        group(layer, "0", 0);
        group(layer, "1", 1);
    });
    assert!(groups.contains("`mlp.experts.down_proj` are in different groups"), "{groups}");
    let settings = refused(&|layer| {
        for (expert, decay) in [(0, 0.0), (1, 0.1)] {
            let of = format!("param_groups.mlp.experts.{expert}.down_proj.weight.weight_decay");
            let path = vec![Key::Name("optim".to_owned()), Key::Name(of)];
            let object = Object { path: path.clone(), role: Role::Optimizer, value: Value::Float(decay) };
            layer.values.insert(join(&path), object);
        }
    });
    assert!(settings.contains("differs from that of other experts"), "{settings}");
    let numbered = refused(&|layer| {
        let path = ["optim", "state", "7", "exp_avg"].map(|step| Key::Name(step.to_owned())).to_vec();
        let tensor = layer.tensors[&name(0, "exp_avg")].clone();
        layer.tensors.insert(join(&path), Tensor { path, ..tensor });
    });
    assert!(numbered.contains("`optim.state.7.exp_avg`") && numbered.contains("--only model"), "{numbered}");
}

#[test]
fn factored_states_of_stacks_are_refused() {
    let mut stacked = of_layer(&[("mlp.experts.down_proj", &[2, 4, 3])]);
    let name = "optim.state.mlp.experts.down_proj.exp_avg";
    stacked.tensors.get_mut(name).unwrap().shape = vec![2, 4];
    let refused = stacked.with_experts(Experts::Separate(ExpertNames::Qwen)).unwrap_err().to_string();
    assert!(refused.contains(&format!("`{name}` has the shape [2, 4]")), "{refused}");
}

#[test]
fn single_values_of_experts_are_listed_by_stack() {
    let weights = ["mlp.experts.0.up_proj.weight", "mlp.experts.1.gate_proj.weight", "mlp.gate.weight"];
    let layer = of_layer(&weights.map(|name| (name, &[1, 1][..])));
    let step = |name: &str| format!("optim.state.{name}.step");
    let expected = [step(weights[0]), step(weights[1])];
    let all = layer.single_values_of_experts();
    assert_eq!(all, [("mlp.experts.gate_up_proj".to_owned(), expected.iter().map(String::as_str).collect())]);
}

#[test]
fn damaged_numbers_of_experts_end_at_once() {
    let stack = of_layer(&[("mlp.experts.down_proj", &[1 << 60, 0, 3])]);
    assert_eq!(
        stack.clone().with_experts(Experts::Separate(ExpertNames::Qwen)).unwrap().tensors,
        stack.tensors
    );
    let last = format!("mlp.experts.{}.down_proj.weight", u64::MAX);
    let lacking = of_layer(&[(&last, &[2, 3])]).with_experts(Experts::Fused).unwrap_err().to_string();
    assert!(lacking.contains("expert 0 lacks its part"), "{lacking}");
}
