use proptest::prelude::*;

use super::*;
use crate::model::{BlockSpec, ELEMENTS_MAX, ModuleSpec, ParamSpec};
use crate::scalars::Tallies;
use crate::testing::{Sketch, setups};

/// A random module tree: for each module its parent, class, and the sizes of its parameters.
type Tree = Vec<(usize, &'static str, Vec<usize>)>;

fn model(tree: &Tree) -> ModelSpec {
    let mut spec = ModelSpec {
        params: Vec::new(),
        modules: Vec::new(),
        blocks: Vec::new(),
        tallies: Tallies::default(),
    };
    for (index, (parent, class, sizes)) in tree.iter().enumerate() {
        let fqn = if index == 0 { String::new() } else { format!("m{index}") };
        let first = spec.params.len();
        for size in sizes {
            let fqn = format!("p{}", spec.params.len());
            spec.params.push(ParamSpec {
                fqn,
                aliases: Vec::new(),
                shape: vec![*size],
                trainable: true,
                expert: None,
                quantized: None,
                keep_f32: false,
            });
        }
        let params = (first..spec.params.len()).map(ParamId).collect();
        let parent = (index > 0).then_some(*parent);
        spec.modules.push(ModuleSpec { fqn, class: (*class).into(), parent, params });
    }
    let params = (0..spec.params.len()).map(ParamId).collect();
    spec.blocks.push(BlockSpec { name: "all".into(), params, layer: None });
    spec
}

/// The size-based rule from the top down, as its documentation describes it. Nothing is wrapped inside a module that is
/// small as a whole, or an attention that must stay whole. Otherwise children are visited first, and the module itself
/// is wrapped if enough is left and it is neither a container nor the root. Returns the number of elements in wrapped
/// modules.
fn wrap_by_size(spec: &ModelSpec, module: usize, min: i64, wrapped: &mut Vec<usize>) -> i64 {
    let (total, class) = (numel(spec, module), spec.modules[module].class.as_str());
    if total < min || class == "MultiheadAttention" {
        return 0;
    }
    let children = (0..spec.modules.len()).filter(|&child| spec.modules[child].parent == Some(module));
    let inside: i64 = children.map(|child| wrap_by_size(spec, child, min, wrapped)).sum();
    let is_container = ["ModuleList", "ModuleDict"].contains(&class);
    if module == 0 || is_container || total - inside < min {
        return inside;
    }
    wrapped.push(module);
    total
}

fn numel(spec: &ModelSpec, module: usize) -> i64 {
    let direct: usize = spec.modules[module].params.iter().map(|&id| spec.param(id).len()).sum();
    let children = (0..spec.modules.len()).filter(|&child| spec.modules[child].parent == Some(module));
    direct as i64 + children.map(|child| numel(spec, child)).sum::<i64>()
}

/// The parameters of each wrapped module and of the root, without those of wrapped modules inside.
fn expected_units(spec: &ModelSpec, wrapped: &[usize]) -> Vec<(String, Vec<ParamId>)> {
    let mut found = Vec::new();
    for module in 0..spec.modules.len() {
        if module > 0 && !wrapped.contains(&module) {
            continue;
        }
        let mut params = Vec::new();
        let mut open = vec![module];
        while let Some(at) = open.pop() {
            params.extend(&spec.modules[at].params);
            let children = (0..spec.modules.len()).filter(|&child| spec.modules[child].parent == Some(at));
            open.extend(children.filter(|child| !wrapped.contains(child)));
        }
        params.sort();
        let name = if module == 0 { "(root)".into() } else { spec.modules[module].fqn.clone() };
        if !params.is_empty() {
            found.push((name, params));
        }
    }
    found
}

fn named(units: Vec<Unit>) -> Vec<(String, Vec<ParamId>)> {
    units.into_iter().map(|unit| (unit.name, unit.params)).collect()
}

fn trees() -> impl Strategy<Value = Tree> {
    let class = prop::sample::select(vec!["A", "B", "ModuleList", "ModuleDict", "MultiheadAttention"]);
    let module = (any::<prop::sample::Index>(), class, prop::collection::vec(1usize..30, 0..3));
    prop::collection::vec(module, 1..14).prop_map(|modules| {
        let parent = |(at, (parent, class, sizes)): (usize, (prop::sample::Index, _, _))| {
            (if at == 0 { 0 } else { parent.index(at) }, class, sizes)
        };
        modules.into_iter().enumerate().map(parent).collect()
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    #[test]
    fn size_based_wrapping_matches_hugging_face(tree in trees(), min in 1usize..90) {
        let spec = model(&tree);
        let mut wrapped = Vec::new();
        wrap_by_size(&spec, 0, min as i64, &mut wrapped);
        let units = units(&spec, &WrapPolicy::MinParams(min)).unwrap();
        prop_assert_eq!(named(units), expected_units(&spec, &wrapped));
    }

    #[test]
    fn class_wrapping_splits_at_every_module_of_class(tree in trees(), pick in any::<[bool; 5]>()) {
        let spec = model(&tree);
        let classes: Vec<String> = ["A", "B", "ModuleList", "ModuleDict", "MultiheadAttention"]
            .iter()
            .zip(pick)
            .filter(|(class, picked)| *picked && spec.modules.iter().any(|module| module.class == **class))
            .map(|(class, _)| (*class).to_string())
            .collect();
        let wrapped: Vec<usize> =
            (0..spec.modules.len()).filter(|&module| classes.contains(&spec.modules[module].class)).collect();
        let units = units(&spec, &WrapPolicy::Classes(classes)).unwrap();
        prop_assert_eq!(named(units), expected_units(&spec, &wrapped));
    }

    #[test]
    fn every_parameter_is_in_exactly_one_unit(setup in setups()) {
        let spec = setup.sketch.spec();
        let Ok(units) = units(&spec, &setup.wrap) else { return Ok(()) };
        let mut params: Vec<ParamId> = units.iter().flat_map(|unit| unit.params.clone()).collect();
        params.sort();
        prop_assert_eq!(params, (0..spec.params.len()).map(ParamId).collect::<Vec<_>>());
        for (index, unit) in units.iter().enumerate() {
            prop_assert!(!unit.params.is_empty());
            prop_assert_eq!(unit.is_root, unit.name == "(root)");
            prop_assert!(!unit.is_root || index == 0);
        }
    }
}

fn classes(names: &[&str]) -> WrapPolicy {
    WrapPolicy::Classes(names.iter().map(|name| (*name).to_string()).collect())
}

#[test]
fn nested_classes_make_nested_units() {
    let spec = Sketch { halves: true, ..Sketch::plain(2) }.spec();
    let units = units(&spec, &classes(&["Layer", "Mlp"])).unwrap();
    let names: Vec<&str> = units.iter().map(|unit| unit.name.as_str()).collect();
    assert_eq!(names, ["(root)", "layers.0", "layers.0.mlp", "layers.1", "layers.1.mlp"]);
    let of = |index: usize| -> Vec<&str> {
        units[index].params.iter().map(|&id| spec.param(id).fqn.as_str()).collect()
    };
    assert_eq!(of(0), ["embed.weight", "scale", "norm.weight", "head.weight"]);
    assert_eq!(of(3), ["layers.1.norm", "layers.1.attention.qkv"]);
    assert_eq!(of(4), ["layers.1.mlp.up", "layers.1.mlp.bias"]);
}

#[test]
fn unknown_class_lists_known_ones() {
    let spec = Sketch::plain(2).spec();
    let error = units(&spec, &classes(&["Layer", "Decoder"])).unwrap_err().to_string();
    assert_eq!(
        error,
        "no module of class `Decoder` to wrap: there are Attention, Embedding, Head, Layer, Mlp, Model, \
         ModuleList, Norm"
    );
}

#[test]
fn tied_parameter_split_across_units_names_both() {
    let spec = Sketch { tied: true, ..Sketch::plain(1) }.spec();
    for wrap in [classes(&["Embedding"]), WrapPolicy::MinParams(6)] {
        let error = units(&spec, &wrap).unwrap_err();
        let crate::Error::TiedAcrossUnits { param, alias, first, second } = error else {
            panic!("another error: {error}")
        };
        assert_eq!((param.as_str(), alias.as_str()), ("embed.weight", "head.weight"));
        assert_eq!((first.as_str(), second.as_str()), ("embed", "(root)"));
    }
    let error = units(&spec, &classes(&["Head"])).unwrap_err();
    let crate::Error::TiedAcrossUnits { first, second, .. } = error else { panic!("another error: {error}") };
    assert_eq!((first.as_str(), second.as_str()), ("(root)", "head"));
    assert!(units(&spec, &classes(&["Layer"])).is_ok());
}

#[test]
fn alias_belongs_to_innermost_enclosing_module() {
    // `mm.x` is not in `m`, whose name is only a textual prefix.
    let mut spec = model(&vec![(0, "M", vec![]), (0, "A", vec![2]), (0, "A", vec![2]), (1, "B", vec![2])]);
    for (module, fqn) in [(1, "m"), (2, "mm"), (3, "m.inner")] {
        spec.modules[module].fqn = fqn.into();
    }
    for (alias, owner) in [("m.x", 1), ("mm.x", 2), ("m.inner.x", 3), ("other.x", 0), ("m", 0)] {
        assert_eq!(module_of(&spec, alias), owner, "{alias}");
    }
}

#[track_caller]
fn assert_invalid(change: impl Fn(&mut ModelSpec), message: &str) {
    let mut spec = Sketch::plain(1).spec();
    assert!(spec.validate().is_ok());
    change(&mut spec);
    let error = units(&spec, &classes(&[])).unwrap_err().to_string();
    assert_eq!(error, format!("invalid model: {message}"));
}

#[test]
fn inconsistent_models_are_rejected() {
    assert_invalid(|spec| spec.blocks.clear(), "the model has no blocks");
    assert_invalid(|spec| spec.modules[1].parent = None, "module embed is a second root");
    assert_invalid(|spec| spec.modules[1].parent = Some(1), "module embed is listed before its parent");
    assert_invalid(|spec| spec.modules[1].params.push(ParamId(99)), "module embed owns unknown parameter 99");
    assert_invalid(
        |spec| spec.modules[1].params.clear(),
        "parameter embed.weight is owned by 0 modules, not one",
    );
    assert_invalid(
        |spec| spec.modules[2].params.push(ParamId(0)),
        "parameter embed.weight is owned by 2 modules, not one",
    );
    assert_invalid(|spec| spec.params[0].shape[1] = 0, "parameter embed.weight has no elements");
    assert_invalid(
        |spec| spec.params[1].aliases.push("embed.weight".into()),
        "two parameters are called embed.weight",
    );
    assert_invalid(|spec| spec.blocks[0].params.push(ParamId(99)), "block embed reads unknown parameter 99");
    assert_invalid(
        |spec| spec.blocks[0].params.truncate(1),
        "no block reads parameter scale, so it cannot be trained",
    );
    let rest = Sketch::plain(1).spec().elements() - Sketch::plain(1).spec().params[0].len();
    let max = ELEMENTS_MAX - rest;
    let mut largest = Sketch::plain(1).spec();
    largest.params[0].shape = vec![max];
    assert!(largest.validate().is_ok());
    for shape in [vec![max + 1], vec![usize::MAX], vec![1 << 40, 1 << 40]] {
        let mut spec = Sketch::plain(1).spec();
        spec.params[0].shape = shape;
        let error = spec.validate().unwrap_err().to_string();
        assert!(error.contains("more than 281474976710656 (2^48) elements"), "{error}");
    }
    let mut unread = Sketch::plain(1).spec();
    unread.blocks[0].params.truncate(1);
    unread.params[1].trainable = false;
    assert!(unread.validate().is_ok(), "a frozen parameter may be unread");
}

/// Names of units, with how many experts' parameters they hold and in how many blocks.
fn divided(wrap: &WrapPolicy, blocks: usize) -> Result<Vec<(String, usize, usize)>, Error> {
    let spec = Sketch { experts: 4, ..Sketch::plain(2) }.spec();
    let units = with_blocks(&spec, units(&spec, wrap)?, blocks)?;
    let experts = |unit: &Unit| unit.params.iter().filter(|&&id| spec.param(id).expert.is_some()).count();
    Ok(units.iter().map(|unit| (unit.name.clone(), experts(unit), unit.blocks)).collect())
}

#[test]
fn experts_become_units_of_their_own() {
    let of = |name: &str, experts, blocks| (name.to_owned(), experts, blocks);
    let layers = classes(&["Layer"]);
    let whole = [of("(root)", 0, 1), of("layers.0", 12, 1), of("layers.1", 12, 1)];
    assert_eq!(divided(&layers, 1).unwrap(), whole);
    let cut = [
        of("(root)", 0, 1),
        of("layers.0", 0, 1),
        of("experts of layers.0", 12, 2),
        of("layers.1", 0, 1),
        of("experts of layers.1", 12, 2),
    ];
    assert_eq!(divided(&layers, 2).unwrap(), cut);
    // Mixtures that one unit has stay together.
    let root = [of("(root)", 0, 1), of("experts of (root)", 24, 4)];
    assert_eq!(divided(&classes(&[]), 4).unwrap(), root);
}

#[test]
fn experts_of_one_mixture_become_one_unit() {
    let mut spec = Sketch { experts: 4, ..Sketch::plain(2) }.spec();
    // Every expert is a unit.
    let of_expert = |(index, param): (usize, &ParamSpec)| {
        param
            .expert
            .map(|expert| (param.fqn.split(".mlp").next().unwrap().to_owned(), expert, ParamId(index)))
    };
    let experts: Vec<_> = spec.params.iter().enumerate().filter_map(of_expert).collect();
    let mut units: Vec<Unit> = Vec::new();
    for (layer, expert, id) in experts {
        let name = format!("{layer}.{expert}");
        match units.iter_mut().find(|unit| unit.name == name) {
            Some(unit) => unit.params.push(id),
            None => {
                units.push(Unit { name, is_root: false, params: vec![id], origin: units.len(), blocks: 1 })
            }
        }
    }
    let joined = with_blocks(&spec, units.clone(), 2).unwrap();
    let names: Vec<_> = joined.iter().map(|unit| (&unit.name[..], unit.params.len())).collect();
    assert_eq!(names, [("experts of layers.0", 12), ("experts of layers.1", 12)]);
    for unit in &joined {
        assert!(unit.params.is_sorted_by_key(|&id| spec.param(id).expert));
    }
    let refused =
        |spec: &ModelSpec, blocks| with_blocks(spec, units.clone(), blocks).unwrap_err().to_string();
    assert!(refused(&spec, 3).contains("must divide the number of experts of layers.0, 4, as 2 does"));
    spec.params[units[0].params[0].0].trainable = false;
    assert!(refused(&spec, 2).contains("experts of layers.0 must be alike"));
    spec.params.iter_mut().for_each(|param| param.expert = None);
    assert!(refused(&spec, 2).contains("no mixtures of experts"));
}
