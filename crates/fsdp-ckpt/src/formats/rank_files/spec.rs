//! Derives the place of a local tensor from the state of a DTensor: the fields of `DTensorSpec` and `DeviceMesh`.
//!
//! PyTorch 2.11 describes the mesh by a layout; earlier versions store the tensor of ranks. Both give the shape of the
//! mesh. All versions store the rank's coordinate.

use fsdp_core::distribution::{Distribution, Placement};

use crate::{
    checkpoint::{Value, element_count},
    error::Error,
    formats::{
        fields::{count, field, items, sizes},
        local::LocalTensor,
        merge::Place,
        rank_fault::placement as placement_fault,
        rank_file::RankFile,
    },
    torch::Item,
};

/// The local tensor, its place in the distributed tensor, and the rank, if the mesh records it.
pub(super) fn parse(
    file: &RankFile,
    name: &str,
    state: &Item,
) -> Result<(LocalTensor, Place, Option<u64>), Error> {
    let state = state.attributes();
    let Some(Item::Tensor(local)) = state.get("_local_tensor") else {
        return Err(file.unexpected(format!("`_local_tensor` of `{name}`"), "a tensor"));
    };
    let spec = state.get("_spec").map(Item::to_value);
    let spec = spec.ok_or_else(|| file.unexpected(format!("`_spec` of `{name}`"), "present"))?;
    let (place, rank) = place(&spec).map_err(|why| placement_fault(name, why).in_file(&file.path))?;
    Ok((LocalTensor::of(local, file.source), place, rank))
}

fn place(spec: &Value) -> Result<(Place, Option<u64>), String> {
    let missing = |what: &str| format!("its specification has no known {what}");
    let shape = field(spec, "tensor_meta").and_then(global_shape).ok_or_else(|| missing("shape"))?;
    element_count(&shape).ok_or_else(|| format!("its shape {shape:?} has too many elements"))?;
    let mesh = field(spec, "mesh").ok_or_else(|| missing("mesh"))?;
    let coordinate =
        field(mesh, "_coordinate_on_dim").and_then(sizes).ok_or_else(|| missing("coordinate"))?;
    let rank = field(mesh, "_rank").and_then(count);
    let mesh = mesh_shape(mesh).ok_or_else(|| missing("mesh shape"))?;
    let placements = field(spec, "placements").and_then(items).ok_or_else(|| missing("placements"))?;
    if placements.len() != mesh.len() {
        let (dims, placements) = (mesh.len(), placements.len());
        return Err(format!("its mesh has {dims} dimensions, but there are {placements} placements"));
    }
    if coordinate.len() != mesh.len() || coordinate.iter().zip(&mesh).any(|(at, ranks)| at >= ranks) {
        return Err(format!("its coordinate {coordinate:?} is outside of its mesh {mesh:?}"));
    }
    let placements = placements.iter().map(placement).collect::<Result<Vec<_>, _>>()?;
    if placements.contains(&Placement::Partial) {
        let supported = "only sharded and replicated tensors are supported";
        return Err(format!("its placement is Partial, a sum that is still to be taken; {supported}"));
    }
    let axes = mesh.into_iter().zip(placements).collect();
    let whole = Distribution::new(shape, axes).map_err(|error| error.to_string())?;
    Ok((Place::At(whole, coordinate), rank))
}

/// The shape in a `TensorMeta`, a named tuple of shape, strides and dtype.
fn global_shape(meta: &Value) -> Option<Vec<u64>> {
    match meta {
        Value::Object { args, .. } if !args.is_empty() => sizes(&args[0]),
        meta => field(meta, "shape").and_then(sizes),
    }
}

/// Number of ranks in each mesh dimension.
fn mesh_shape(mesh: &Value) -> Option<Vec<u64>> {
    if let Some(layout) = field(mesh, "_layout") {
        let shape = match layout {
            Value::Object { args, state: None, .. } => args.first()?,
            layout => field(layout, "shape")?,
        };
        return match shape {
            Value::Int(_) => Some(vec![count(shape)?]),
            shape => items(shape)?.iter().map(ranks).collect(),
        };
    }
    // The tensor of ranks, represented as an object with dtype and shape arguments.
    match field(mesh, "mesh").or_else(|| field(mesh, "_mesh"))? {
        Value::Object { args, .. } => sizes(args.get(1)?),
        _ => None,
    }
}

/// Number of ranks in a mesh dimension, which may be several dimensions flattened into one.
fn ranks(dim: &Value) -> Option<u64> {
    match dim {
        Value::Int(_) => count(dim),
        dim => items(dim)?.iter().map(ranks).try_fold(1u64, |all, ranks| all.checked_mul(ranks?)),
    }
}

fn placement(value: &Value) -> Result<Placement, String> {
    let Value::Object { class, args, .. } = value else {
        return Err("a placement is not an object".to_owned());
    };
    let number = |name: &str, index: usize| field(value, name).or(args.get(index)).and_then(count);
    let dim = || {
        let dim = number("dim", 0).and_then(|dim| usize::try_from(dim).ok());
        dim.ok_or_else(|| format!("its placement {} has no dimension", class.name))
    };
    match &class.name[..] {
        "Replicate" => Ok(Placement::Replicate),
        "Partial" | "_Partial" => Ok(Placement::Partial),
        "Shard" => Ok(Placement::Shard(dim()?)),
        "_StridedShard" => {
            let split_factor = number("split_factor", 1);
            let split_factor = split_factor.ok_or("its strided shard has no split factor")?;
            Ok(Placement::StridedShard { dim: dim()?, split_factor })
        }
        other => Err(format!("its placement is {other}; only sharded and replicated tensors are supported")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::Global;

    fn object(name: &str, args: Vec<Value>, state: &[(&str, Value)]) -> Value {
        let class = Global { module: "torch".into(), name: name.into() };
        let state = state.iter().map(|(key, value)| (Value::Str((*key).into()), value.clone()));
        let state: Vec<_> = state.collect();
        let state = (!state.is_empty()).then(|| Box::new(Value::Dict(state)));
        Value::Object { class, args, state }
    }

    fn ints(numbers: &[i64]) -> Value {
        Value::Tuple(numbers.iter().map(|n| Value::Int(*n)).collect())
    }

    fn spec(mesh: Value, placements: Vec<Value>) -> Value {
        let size = object("Size", vec![ints(&[10, 6])], &[]);
        let meta = object("TensorMeta", vec![size, ints(&[6, 1]), Value::None], &[]);
        let fields = [("mesh", mesh), ("placements", Value::Tuple(placements)), ("tensor_meta", meta)];
        object("DTensorSpec", vec![], &fields)
    }

    fn shard(dim: i64) -> Value {
        object("Shard", vec![], &[("dim", Value::Int(dim))])
    }

    #[test]
    fn mesh_shape_is_read_from_all_torch_versions() {
        let coordinate = ("_coordinate_on_dim", ints(&[1, 0]));
        let layout = object("_MeshLayout", vec![], &[("shape", ints(&[2, 3])), ("stride", ints(&[3, 1]))]);
        let new = object("DeviceMesh", vec![], &[("_layout", layout), coordinate.clone()]);
        let tensor = object("Tensor", vec![Value::Str("I32".into()), ints(&[2, 3])], &[]);
        let coordinate = ("_coordinate_on_dim", Value::List(vec![Value::Int(1), Value::Int(0)]));
        let old = object("DeviceMesh", vec![], &[("mesh", tensor), coordinate]);
        for mesh in [new, old] {
            let placements = vec![object("Replicate", vec![], &[]), shard(1)];
            let (Place::At(whole, coordinate), None) = place(&spec(mesh, placements)).unwrap() else {
                panic!("it is at a coordinate, of a rank that is not recorded")
            };
            assert_eq!(whole.axes(), [(2, Placement::Replicate), (3, Placement::Shard(1))]);
            assert_eq!((whole.shape(), &coordinate[..]), (&[10, 6][..], &[1, 0][..]));
        }
        let flattened = object("_MeshLayout", vec![], &[("shape", Value::Tuple(vec![ints(&[2, 3])]))]);
        assert_eq!(mesh_shape(&object("DeviceMesh", vec![], &[("_layout", flattened)])), Some(vec![6]));
        let single = object("_MeshLayout", vec![], &[("shape", Value::Int(4))]);
        assert_eq!(mesh_shape(&object("DeviceMesh", vec![], &[("_layout", single)])), Some(vec![4]));
    }

    #[test]
    fn rejects_partial_placements_and_bad_coordinates() {
        let mesh = |at: i64| {
            let layout = object("_MeshLayout", vec![], &[("shape", ints(&[2]))]);
            object("DeviceMesh", vec![], &[("_layout", layout), ("_coordinate_on_dim", ints(&[at]))])
        };
        let partial = object("Partial", vec![], &[("reduce_op", Value::Str("sum".into()))]);
        let why = place(&spec(mesh(0), vec![partial])).unwrap_err();
        assert!(why.contains("Partial"), "{why}");
        assert!(place(&spec(mesh(2), vec![shard(0)])).unwrap_err().contains("outside of its mesh"));
        assert!(place(&spec(mesh(0), vec![shard(2)])).unwrap_err().contains("dimension 2"));
        assert!(place(&spec(mesh(0), vec![])).unwrap_err().contains("0 placements"));
        assert!(place(&object("DTensorSpec", vec![], &[])).unwrap_err().contains("no known shape"));
        place(&spec(mesh(1), vec![shard(0)])).unwrap();
    }
}
