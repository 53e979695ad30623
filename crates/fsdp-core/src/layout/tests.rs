use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;
use crate::model::{BlockSpec, ModuleSpec, ParamSpec};
use crate::scalars::Tallies;
use crate::wrap::with_blocks;

type Shape = (Vec<usize>, bool);

fn model(params: &[Shape]) -> ModelSpec {
    let ids: Vec<ParamId> = (0..params.len()).map(ParamId).collect();
    let spec = |(index, (shape, trainable)): (usize, &Shape)| ParamSpec {
        fqn: format!("p{index}"),
        aliases: Vec::new(),
        shape: shape.clone(),
        trainable: *trainable,
        expert: None,
        quantized: None,
        keep_f32: false,
    };
    ModelSpec {
        params: params.iter().enumerate().map(spec).collect(),
        modules: vec![ModuleSpec {
            fqn: String::new(),
            class: "M".into(),
            parent: None,
            params: ids.clone(),
        }],
        blocks: vec![BlockSpec { name: "all".into(), params: ids, layer: None }],
        tallies: Tallies::default(),
    }
}

/// Units that hold the parameters whose entry in `of` is 0, 1, ...
fn cut(of: &[usize]) -> Vec<Unit> {
    let mut params: BTreeMap<usize, Vec<ParamId>> = BTreeMap::new();
    for (param, unit) in of.iter().enumerate() {
        params.entry(*unit).or_default().push(ParamId(param));
    }
    let unit = |(index, params): (usize, Vec<ParamId>)| Unit {
        name: format!("unit {index}"),
        is_root: index == 0,
        params,
        origin: index,
        blocks: 1,
    };
    params.into_iter().map(unit).collect()
}

/// Number of rows between aligned starts, for rows of `row_len` elements.
fn alignment_rows(row_len: usize, dtype: DType) -> usize {
    (1..).find(|rows| (rows * row_len * dtype.size_bytes()).is_multiple_of(16)).unwrap()
}

fn assert_owned_once(spec: &ModelSpec, layout: &Layout) {
    for (id, param) in spec.params.iter().enumerate() {
        let mut owners = vec![0; param.len()];
        for segment in layout.units.iter().flat_map(|unit| &unit.segments) {
            for shard in 0..layout.shards {
                for piece in segment.pieces(shard).iter().filter(|piece| piece.param == ParamId(id)) {
                    owners[piece.param_offset..piece.param_offset + piece.len]
                        .iter_mut()
                        .for_each(|n| *n += 1);
                }
            }
        }
        assert!(owners.iter().all(|&n| n == 1), "{param:?} is owned {owners:?}");
    }
}

/// Asserts that concatenated shards equal the unsharded segment, with each element named by parameter and index.
fn assert_shards_make_the_segment(spec: &ModelSpec, segment: &Segment) {
    for block in 0..segment.blocks {
        assert_shards_make_the_block(spec, segment, block);
    }
    let mut padded = vec![false; segment.unsharded_len()];
    for place in segment.gathered() {
        padded[place.offset..][..place.len].fill(true);
    }
    for (offset, len) in segment.padding() {
        assert!(len > 0);
        padded[offset..offset + len].iter_mut().for_each(|element| {
            assert!(!std::mem::replace(element, true), "padding overlaps a parameter, or itself");
        });
    }
    assert!(padded.iter().all(|&padded| padded));
}

fn assert_shards_make_the_block(spec: &ModelSpec, segment: &Segment, block: usize) {
    let mut whole = vec![None; segment.unsharded_len()];
    for place in segment.params.iter().filter(|place| place.block == block) {
        assert_eq!(place.len, spec.param(place.param).len());
        for element in 0..place.len {
            assert_eq!(whole[place.offset + element].replace((place.param, element)), None, "an overlap");
        }
    }
    let mut from_shards = Vec::new();
    // Every `blocks`-th rank has the same block.
    for shard in (block..segment.shards * segment.blocks).step_by(segment.blocks) {
        let mut own = vec![None; segment.shard_len()];
        let mut end = 0;
        for piece in segment.pieces(shard) {
            assert!(piece.len > 0 && piece.offset >= end, "pieces follow each other");
            end = piece.offset + piece.len;
            let row_len = spec.param(piece.param).row_len().unwrap_or(1);
            assert_eq!(piece.row_len, row_len);
            assert!(piece.len.is_multiple_of(row_len) && piece.param_offset.is_multiple_of(row_len));
            for element in 0..piece.len {
                own[piece.offset + element] = Some((piece.param, piece.param_offset + element));
            }
        }
        from_shards.extend(own);
    }
    assert_eq!(from_shards, whole);
}

fn assert_placed_well(spec: &ModelSpec, segment: &Segment, dtype: DType) {
    let rows = alignment_rows(segment.row_len, dtype);
    let mut allowed = (segment.shards - 1) * segment.row_len;
    for (index, place) in segment.params.iter().enumerate() {
        let param = spec.param(place.param);
        assert!((place.offset * dtype.size_bytes()).is_multiple_of(16), "aligned");
        assert!(place.offset.is_multiple_of(segment.row_len), "starts with a row");
        assert!(param.row_len().is_none_or(|row_len| row_len == segment.row_len));
        assert_eq!(place.row_len, param.row_len().unwrap_or(1));
        assert_eq!(param.trainable, segment.trainable);
        allowed += if index > 0 { (rows - 1) * segment.row_len } else { 0 };
        allowed += place.len.next_multiple_of(segment.row_len) - place.len;
    }
    assert_eq!(segment.params[0].offset, 0);
    let padding: usize = segment.padding().iter().map(|(_, len)| len).sum();
    assert!(padding <= allowed, "{padding} elements of padding in {segment:?}");
}

fn assert_segments_of_unit(spec: &ModelSpec, unit: &UnitLayout) {
    let keys: Vec<(bool, usize)> = unit.segments.iter().map(|s| (!s.trainable, s.row_len)).collect();
    let mut unique = keys.clone();
    unique.sort();
    unique.dedup();
    assert_eq!(keys.len(), unique.len(), "one segment per kind and row length");
    assert!(keys.is_sorted_by_key(|(frozen, _)| *frozen), "trainable segments come first");
    assert_eq!(unit.is_trainable(), unit.segments.iter().any(|segment| segment.trainable));
    assert_eq!(unit.trainable_segments().count(), keys.iter().filter(|(frozen, _)| !frozen).count());
    let with_rows = |segment: &Segment| -> usize {
        let params = segment.params.iter().filter(|place| spec.param(place.param).row_len().is_some());
        params.map(|place| place.len).sum()
    };
    for trainable in [true, false] {
        let of_kind: Vec<&Segment> = unit.segments.iter().filter(|s| s.trainable == trainable).collect();
        let largest = of_kind.iter().map(|segment| with_rows(segment)).max().unwrap_or(0);
        for segment in of_kind {
            let rides = segment.params.iter().any(|place| spec.param(place.param).row_len().is_none());
            assert!(!rides || with_rows(segment) == largest, "parameters without rows ride in the largest");
            assert!(with_rows(segment) > 0 || segment.row_len == 16);
        }
    }
    let elements: usize = unit.segments.iter().flat_map(|s| &s.params).map(|place| place.len).sum();
    let unsharded: usize = unit.segments.iter().map(Segment::unsharded_len).sum();
    assert!((unit.padding_factor() - unsharded as f64 / elements as f64).abs() < 1e-12);
}

fn assert_sound(params: &[Shape], of: &[usize], shards: usize, dtype: DType) {
    let (spec, units) = (model(params), cut(of));
    let layout = Layout::new(&spec, &units, shards, dtype);
    assert_eq!(layout, Layout::new(&spec, &units, shards, dtype));
    assert_owned_once(&spec, &layout);
    for (unit, expected) in layout.units.iter().zip(&units) {
        assert_eq!((&unit.name, unit.is_root), (&expected.name, expected.is_root));
        assert_segments_of_unit(&spec, unit);
        for segment in &unit.segments {
            assert_eq!(segment.shards, shards);
            assert_shards_make_the_segment(&spec, segment);
            assert_placed_well(&spec, segment, dtype);
        }
    }
    let alone = Layout::new(&spec, &units, 1, dtype);
    for (id, &unit) in of.iter().enumerate() {
        let (found, segment, place) = layout.find(ParamId(id)).expect("every parameter has a place");
        assert_eq!(layout.unit(found).name, cut(of)[found.0].name);
        assert!(cut(of)[found.0].params.contains(&ParamId(id)), "parameter {id} belongs to unit {unit}");
        assert!(layout.unit(found).segments[segment.0].params.contains(&place));
        assert_eq!(place.param, ParamId(id));
        // Sharding determines the owner of an element, never its position.
        assert_eq!(alone.find(ParamId(id)), Some((found, segment, place)));
    }
    assert_eq!(layout.find(ParamId(of.len())), None);
}

#[test]
fn layouts_of_up_to_three_small_parameters_are_valid() {
    let shapes: [&[usize]; 9] = [&[], &[1], &[3], &[17], &[2, 3], &[3, 4], &[1, 5], &[5, 3], &[2, 1, 4]];
    let menu: Vec<Shape> =
        shapes.iter().flat_map(|shape| [true, false].map(|trainable| (shape.to_vec(), trainable))).collect();
    let mut models: Vec<Vec<Shape>> = vec![Vec::new()];
    for _ in 0..3 {
        let longer: Vec<Vec<Shape>> = models
            .iter()
            .flat_map(|params| {
                menu.iter().map(|shape| {
                    let mut params = params.clone();
                    params.push(shape.clone());
                    params
                })
            })
            .collect();
        for (index, params) in longer.iter().enumerate() {
            let dtype = [DType::F32, DType::Bf16, DType::F64][index % 3];
            for shards in 1..=5 {
                assert_sound(params, &vec![0; params.len()], shards, dtype);
            }
        }
        models = longer;
    }
}

fn shapes() -> impl Strategy<Value = Shape> {
    (prop::collection::vec(1usize..10, 0..4), prop::bool::weighted(0.7))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]

    #[test]
    fn random_layouts_are_valid(
        params in prop::collection::vec((shapes(), 0usize..3), 1..10),
        shards in 1usize..12,
        dtype in prop::sample::select(vec![DType::F32, DType::Bf16, DType::F64]),
    ) {
        let (params, of): (Vec<Shape>, Vec<usize>) = params.into_iter().unzip();
        assert_sound(&params, &of, shards, dtype);
    }
}

#[test]
fn rowless_parameter_goes_to_first_of_equal_segments() {
    let params = [(vec![2, 6], true), (vec![3, 4], true), (vec![5], true)];
    let layout = Layout::new(&model(&params), &cut(&[0, 0, 0]), 2, DType::F32);
    assert_eq!(
        layout.find(ParamId(2)).map(|(unit, segment, _)| (unit, segment)),
        Some((UnitId(0), SegmentId(0)))
    );
}

#[test]
fn unit_without_rows_uses_rows_of_16_elements() {
    let params = [(vec![3], true), (vec![], true), (vec![40], true)];
    let layout = Layout::new(&model(&params), &cut(&[0, 0, 0]), 3, DType::F32);
    let [segment] = layout.units[0].segments.as_slice() else { panic!("one segment") };
    assert_eq!((segment.row_len, segment.rows_per_rank), (16, 2));
    let offsets: Vec<usize> = segment.params.iter().map(|place| place.offset).collect();
    assert_eq!(offsets, [0, 16, 32]);
    assert_eq!(segment.padding(), [(3, 13), (17, 15), (72, 24)]);
}

#[test]
fn find_returns_unit_segment_and_place() {
    let params = [(vec![2, 6], true), (vec![3, 4], false), (vec![5], true), (vec![7], true)];
    let mut units = cut(&[0, 1, 1, 0]);
    units[0].params.pop();
    let layout = Layout::new(&model(&params), &units, 2, DType::F32);
    for (unit, held) in layout.units.iter().enumerate() {
        for (index, segment) in held.segments.iter().enumerate() {
            for place in &segment.params {
                assert_eq!(layout.find(place.param), Some((UnitId(unit), SegmentId(index), *place)));
            }
        }
    }
    assert_eq!(layout.find(ParamId(3)), None, "no unit has it");
    assert_eq!(layout.find(ParamId(4)), None);
}

#[test]
fn zero_shards_panics() {
    let empty = std::panic::catch_unwind(|| Layout::new(&model(&[]), &[], 0, DType::F32));
    assert!(empty.is_err());
}

proptest! {
    #[test]
    fn blocks_of_experts_are_alike_and_owned_once(
        experts in 1usize..4, blocks in 1usize..4, shards in 1usize..4, rows in 1usize..4, cols in 1usize..6,
    ) {
        let shapes: [&[usize]; 3] = [&[rows, cols], &[cols, rows], &[rows]];
        let of_expert = |expert| shapes.map(|shape| (shape.to_vec(), expert));
        let params: Vec<(Vec<usize>, usize)> = (0..experts * blocks).flat_map(of_expert).collect();
        let mut spec = model(&params.iter().map(|(shape, _)| (shape.clone(), true)).collect::<Vec<_>>());
        for (param, (_, expert)) in spec.params.iter_mut().zip(&params) {
            param.expert = Some(*expert);
        }
        let ids: Vec<ParamId> = (0..params.len()).map(ParamId).collect();
        let unit = Unit { name: "u".into(), is_root: true, params: ids, origin: 0, blocks: 1 };
        let units = with_blocks(&spec, vec![unit], blocks).unwrap();
        prop_assert_eq!(units.len(), 1);
        let layout = Layout::new(&spec, &units, shards * blocks, DType::F32);
        assert_owned_once(&spec, &layout);
        for segment in &layout.units[0].segments {
            assert_shards_make_the_segment(&spec, segment);
            for place in &segment.params {
                // A parameter of another block is called by that of the first in the same place.
                let stands_in = ParamId(place.param.0 % (experts * shapes.len()));
                let (.., first) = layout.find(stands_in).unwrap();
                prop_assert_eq!(Extent { param: place.param, block: place.block, ..first }, *place);
                let named = layout.called(&[place.param]).count();
                prop_assert_eq!(named, usize::from(place.param == stands_in));
            }
        }
    }
}
