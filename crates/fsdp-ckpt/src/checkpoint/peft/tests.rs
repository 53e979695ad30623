use super::*;
use crate::{
    checkpoint::{Object, Tensor},
    safetensors::TensorType,
};

fn checkpoint(model: &[&str], states: &[&str]) -> Checkpoint {
    let tensor = |path: &[&str], role: Role| {
        let path: Vec<Key> = path.iter().map(|step| Key::Name((*step).to_owned())).collect();
        let tensor = Tensor { path, role, dtype: TensorType::F32, shape: vec![1], chunks: Vec::new() };
        (join(&tensor.path), tensor)
    };
    let models = model.iter().map(|name| tensor(&["model", name], Role::Model));
    let states = states.iter().map(|name| tensor(&["optim", "state", name, "exp_avg"], Role::Optimizer));
    Checkpoint { tensors: models.chain(states).collect(), ..Checkpoint::default() }
}

fn names(checkpoint: Checkpoint, copies: Copies) -> Vec<String> {
    checkpoint.without_peft(copies).unwrap().tensors.into_keys().collect()
}

const WHOLE: [&str; 6] = [
    "base_model.model.model.q.base_layer.weight",
    "base_model.model.model.q.lora_A.default.weight",
    "base_model.model.model.q.lora_B.default.weight",
    "base_model.model.model.norm.weight",
    "base_model.model.head.original_module.weight",
    "base_model.model.head.modules_to_save.default.weight",
];

#[test]
fn names_are_those_of_the_model_without_peft() {
    let whole = checkpoint(&WHOLE, &[WHOLE[1], WHOLE[5]]);
    assert!(whole.has_adapters() && whole.has_base_of_adapters());
    let expected = [
        "model.head.weight",
        "model.model.norm.weight",
        "model.model.q.lora_A.weight",
        "model.model.q.lora_B.weight",
        "model.model.q.weight",
        "optim.state.head.weight.exp_avg",
        "optim.state.model.q.lora_A.weight.exp_avg",
    ];
    assert_eq!(names(whole.clone(), Copies::Trained), expected);
    // The optimizer has no state of the base's copy.
    let of_base = names(whole.clone(), Copies::Base);
    assert_eq!(of_base, expected.into_iter().filter(|name| *name != expected[5]).collect::<Vec<_>>());
    assert_eq!(whole.trained_beside_adapters(), BTreeSet::from(["head.weight".to_owned()]));
}

#[test]
fn what_peft_saves_alone_has_no_base() {
    let saved = checkpoint(
        &["base_model.model.model.q.lora_A.weight", "base_model.model.head.weight"],
        &["module.base_model.model.model.q.lora_A.default.weight"],
    );
    assert!(saved.has_adapters() && !saved.has_base_of_adapters());
    assert_eq!(saved.trained_beside_adapters(), BTreeSet::from(["head.weight".to_owned()]));
    let expected =
        ["model.head.weight", "model.model.q.lora_A.weight", "optim.state.model.q.lora_A.weight.exp_avg"];
    assert_eq!(names(saved, Copies::Trained), expected);
    assert!(!checkpoint(&["model.q.weight"], &[]).has_adapters());
}

/// PEFT saves magnitudes without the name of the parameter that they are in memory.
#[test]
fn magnitudes_have_one_name() {
    let in_memory = "base_model.model.model.q.lora_magnitude_vector.default.weight";
    let mut whole = WHOLE.to_vec();
    whole.push(in_memory);
    let plain = names(checkpoint(&whole, &[in_memory]), Copies::Trained);
    assert!(plain.contains(&"model.model.q.lora_magnitude_vector".to_owned()), "{plain:?}");
    assert!(plain.contains(&"optim.state.model.q.lora_magnitude_vector.exp_avg".to_owned()), "{plain:?}");
    let saved = checkpoint(&["base_model.model.model.q.lora_magnitude_vector"], &[]);
    assert!(saved.has_adapters() && saved.trained_beside_adapters().is_empty());
    assert_eq!(names(saved, Copies::Trained), ["model.model.q.lora_magnitude_vector"]);
}

#[test]
fn members_of_groups_are_renamed() {
    let mut whole = checkpoint(&WHOLE, &[]);
    let path = ["optim", "param_groups", "0", "params"].map(|step| Key::Name(step.to_owned())).to_vec();
    let params = |names: [&str; 2]| Value::List(names.map(|name| Value::Str(name.to_owned())).to_vec());
    let value = params([WHOLE[1], WHOLE[5]]);
    whole.values.insert(join(&path), Object { path: path.clone(), role: Role::Optimizer, value });
    let plain = whole.without_peft(Copies::Trained).unwrap();
    assert_eq!(plain.values[&join(&path)].value, params(["model.q.lora_A.weight", "head.weight"]));
}

#[test]
fn anything_but_one_plain_adapter_is_refused() {
    let refused = |name: &str| {
        let mut all = WHOLE.to_vec();
        all.push(name);
        checkpoint(&all, &[]).without_peft(Copies::Trained).unwrap_err().to_string()
    };
    let two = refused("base_model.model.model.q.lora_A.other.weight");
    assert!(two.contains("several adapters (default, other)"), "{two}");
    for name in [
        "base_model.model.model.embed.lora_embedding_A.default",
        "base_model.model.model.q.lora_B.default.bias",
    ] {
        assert!(refused(name).contains("LoRA and DoRA of linear maps do not have"), "{name}");
    }
    let same = refused("base_model.model.model.q.weight");
    assert!(same.contains("two tensors would be `model.model.q.weight`"), "{same}");
}
