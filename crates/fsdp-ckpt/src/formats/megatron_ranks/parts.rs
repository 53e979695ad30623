//! Places what the file of a rank holds in whole tensors, as tensor parallelism cuts them.

use super::{
    Sizes,
    names::{Cut, cut_of},
    optimizer::State,
};
use crate::{
    checkpoint::{Key, Role, len_bytes},
    error::Fault,
    formats::{
        local::LocalTensor,
        merge::{Part, Place},
    },
};

impl Sizes {
    /// The parts of tensors in the file of a tensor rank: parameters, and the states of these.
    pub(super) fn parts(
        &self,
        rank: u64,
        parameters: &[(String, LocalTensor)],
        states: &[State],
    ) -> Result<Vec<Part>, Fault> {
        let mut parts = Vec::new();
        for (name, local) in parameters {
            let path = vec![Key::Name(name.clone())];
            self.add_part(name, (path, Role::Model), local.clone(), rank, &mut parts)?;
        }
        for (parameter, state, local) in states {
            let name = &parameters[*parameter].0;
            let path = ["optimizer", "state", name, state].map(|step| Key::Name(step.to_owned())).to_vec();
            self.add_part(name, (path, Role::Optimizer), local.clone(), rank, &mut parts)?;
        }
        Ok(parts)
    }

    fn add_part(
        &self,
        name: &str,
        (path, role): (Vec<Key>, Role),
        local: LocalTensor,
        rank: u64,
        parts: &mut Vec<Part>,
    ) -> Result<(), Fault> {
        let too_large = || Fault::new(format!("`{name}` has more elements than can be counted"));
        let mut add = |local: LocalTensor, dim: usize, index: u64, count: u64| {
            let (mut offsets, mut shape) = (vec![0; local.shape.len()], local.shape.clone());
            if count > 1 {
                offsets[dim] = local.shape[dim].checked_mul(index).ok_or_else(too_large)?;
                shape[dim] = local.shape[dim].checked_mul(count).ok_or_else(too_large)?;
                len_bytes(&shape, local.dtype.size_bytes()).ok_or_else(too_large)?;
            }
            parts.push(Part {
                path: path.clone(),
                role,
                local,
                place: Place::From { offsets, shape },
                windows: None,
            });
            Ok::<_, Fault>(())
        };
        let dims = local.shape.len();
        match cut_of(name, self.is_gated) {
            // A step count, like a tensor that is not cut.
            _ if self.tensor == 1 || dims == 0 => add(local, 0, 0, 1),
            None => Err(Fault::unsupported(format!(
                "`{name}` is one of {} parts, and it is not known which dimension they share; convert it with Megatron",
                self.tensor
            ))),
            Some(Cut::Whole) => add(local, 0, 0, 1),
            Some(Cut::Dim(dim)) if dim < dims => add(local, dim, rank, self.tensor),
            Some(Cut::GateAndUp) if dims > 0 && local.shape[0].is_multiple_of(2) => {
                let half = local.shape[0] / 2;
                for part in 0..2 {
                    let mut rows = local.clone();
                    rows.shape[0] = half;
                    // Strides of an empty tensor may be anything.
                    if rows.len() > 0 {
                        rows.offset += part * half * rows.strides[0] * rows.dtype.size_bytes() as u64;
                    }
                    add(rows, 0, part * self.tensor + rank, 2 * self.tensor)?;
                }
                Ok(())
            }
            Some(_) => {
                Err(Fault::new(format!("`{name}` of shape {:?} cannot be cut as its name says", local.shape)))
            }
        }
    }
}
