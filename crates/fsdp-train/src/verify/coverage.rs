//! Checks that ranks hold the values that they should, before these are compared.
//!
//! Comparing the elements that exist says nothing about missing ones. Every replica must hold each parameter and
//! gradient element exactly once, and each optimizer value at least once (all ranks with rows of a parameter hold
//! Adafactor's column means). Replicas of a shard compute the same values, so they must hold the same bits, whatever is
//! promised relative to the oracle (contract D0).

use fsdp_core::model::{ModelSpec, ParamId};
use fsdp_core::{Axis, Mesh, Rank};

use super::snapshot::{Pieces, Snapshot};
use crate::shard_runs::Kind;

/// All values of one kind that a parameter has.
pub(super) struct Expected {
    kind: Kind,
    param: ParamId,
    len: usize,
}

/// All values of a model of the kinds that are wanted.
pub(super) fn expected(reference: &Snapshot, is_expected: impl Fn(Kind) -> bool) -> Vec<Expected> {
    let mut all = Vec::new();
    let mut add = |kind, param, len| {
        if is_expected(kind) && len > 0 {
            all.push(Expected { kind, param: ParamId(param), len });
        }
    };
    for (param, values) in reference.params.iter().enumerate() {
        add(Kind::Param, param, values.len());
    }
    for (param, values) in reference.gradients.iter().enumerate() {
        add(Kind::Gradient, param, values.as_ref().map_or(0, Vec::len));
    }
    for (param, tensors) in reference.states.iter().enumerate() {
        for (index, values) in tensors.iter().enumerate() {
            add(Kind::State(index), param, values.len());
        }
    }
    all
}

/// Describes values that a replica does not hold as it should, one sentence each. `ranks` is indexed by rank.
pub(super) fn gaps(spec: &ModelSpec, mesh: Mesh, expected: &[Expected], ranks: &[&Pieces]) -> Vec<String> {
    let mut found = Vec::new();
    for replica in 0..mesh.size(Axis::Replicate) {
        let held = (0..ranks.len()).filter(|&rank| mesh.coordinate(Rank(rank), Axis::Replicate) == replica);
        let held: Vec<&Pieces> = held.map(|rank| ranks[rank]).collect();
        for &Expected { kind, param, len } in expected {
            let runs = held.iter().flat_map(|pieces| &pieces.values);
            let runs = runs.filter(|run| (run.kind, run.param) == (kind, param));
            let mut runs: Vec<[usize; 2]> =
                runs.map(|run| [run.first, run.first + run.values.len()]).collect();
            runs.sort_unstable();
            let all: usize = runs.iter().map(|[first, end]| end - first).sum();
            let distinct = distinct(&runs);
            let repeats = matches!(kind, Kind::Param | Kind::Gradient) && all != distinct;
            if distinct != len || repeats {
                let (what, fqn) = (name(kind), &spec.param(param).fqn);
                found.push(format!(
                    "replica {replica} holds {distinct} of the {len} elements of {what} {fqn}, {all} with \
                     duplicates"
                ));
            }
        }
    }
    found
}

/// Number of elements in the union of sorted ranges.
fn distinct(runs: &[[usize; 2]]) -> usize {
    let (mut count, mut reached) = (0, 0);
    for &[first, end] in runs {
        count += end.saturating_sub(first.max(reached));
        reached = reached.max(end);
    }
    count
}

/// Describes ranks whose values differ from those of the first rank with the same shard, one sentence each.
pub(super) fn unequal_replicas(mesh: Mesh, ranks: &[&Pieces]) -> Vec<String> {
    let shard = |rank: usize| mesh.shard(Rank(rank));
    let mut found = Vec::new();
    for rank in 0..ranks.len() {
        let first = (0..rank).find(|&other| shard(other) == shard(rank));
        if let Some(first) = first.filter(|&first| !same_bits(ranks[first], ranks[rank])) {
            found.push(format!("rank {rank} holds different bits than rank {first}, a replica of its shard"));
        }
    }
    found
}

fn same_bits(one: &Pieces, other: &Pieces) -> bool {
    let bits = |values: &[f64]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
    one.values.len() == other.values.len()
        && one.values.iter().zip(&other.values).all(|(one, other)| {
            (one.kind, one.param, one.first) == (other.kind, other.param, other.first)
                && bits(&one.values) == bits(&other.values)
        })
}

fn name(kind: Kind) -> &'static str {
    match kind {
        Kind::Param => "parameter",
        Kind::Gradient => "the gradient of",
        Kind::State(_) => "the optimizer state of",
    }
}

#[cfg(test)]
mod tests {
    use fsdp_core::Tallies;
    use fsdp_core::model::ParamSpec;

    use super::super::snapshot::Held;
    use super::*;

    fn spec() -> ModelSpec {
        let param = ParamSpec {
            fqn: "w".into(),
            aliases: vec![],
            shape: vec![4],
            trainable: true,
            expert: None,
            quantized: None,
            keep_f32: false,
        };
        ModelSpec { params: vec![param], modules: vec![], blocks: vec![], tallies: Tallies::default() }
    }

    fn pieces(runs: &[(Kind, usize, &[f64])]) -> Pieces {
        let held = |&(kind, first, values): &(Kind, usize, &[f64])| Held {
            kind,
            param: ParamId(0),
            first,
            values: values.to_vec(),
        };
        Pieces { values: runs.iter().map(held).collect() }
    }

    fn gaps_of(kind: Kind, ranks: &[Pieces]) -> Vec<String> {
        let reference = Snapshot {
            params: vec![vec![0.0; 4]],
            gradients: vec![Some(vec![0.0; 4])],
            states: vec![vec![vec![0.0; 4]]],
        };
        let mesh = Mesh::new([(Axis::Shard, ranks.len())]).unwrap();
        let expected = expected(&reference, |found| found == kind);
        gaps(&spec(), mesh, &expected, &ranks.iter().collect::<Vec<_>>())
    }

    #[test]
    fn elements_held_by_no_rank_are_found() {
        for kind in [Kind::Param, Kind::Gradient, Kind::State(0)] {
            let complete = [pieces(&[(kind, 0, &[0.0; 2])]), pieces(&[(kind, 2, &[0.0; 2])])];
            assert_eq!(gaps_of(kind, &complete), [""; 0]);
            let short = [pieces(&[(kind, 0, &[0.0; 2])]), pieces(&[(kind, 3, &[0.0; 1])])];
            assert!(gaps_of(kind, &short)[0].starts_with("replica 0 holds 3 of the 4 elements"));
            assert_eq!(gaps_of(kind, &[pieces(&[]), pieces(&[])]).len(), 1);
        }
    }

    #[test]
    fn only_optimizer_state_may_be_held_twice() {
        for (kind, found) in [(Kind::Param, 1), (Kind::Gradient, 1), (Kind::State(0), 0)] {
            let twice = [pieces(&[(kind, 0, &[0.0; 4])]), pieces(&[(kind, 0, &[0.0; 4])])];
            assert_eq!(gaps_of(kind, &twice).len(), found, "{kind:?}");
        }
    }

    #[test]
    fn replicas_with_different_bits_are_found() {
        let [one, zero, minus] = [1.0, 0.0, -0.0].map(|value| pieces(&[(Kind::Param, 0, &[value])]));
        let mesh = Mesh::new([(Axis::Replicate, 2), (Axis::Shard, 2)]).unwrap();
        assert_eq!(unequal_replicas(mesh, &[&zero, &one, &zero, &one]), [""; 0]);
        let found = unequal_replicas(mesh, &[&zero, &one, &minus, &one]);
        assert_eq!(found, ["rank 2 holds different bits than rank 0, a replica of its shard"]);
    }
}
