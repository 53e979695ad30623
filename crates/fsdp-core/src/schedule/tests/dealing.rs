//! Tests of the assignment of micro-batches to ranks and rounds.

use crate::schedule::{Accumulation, micro_batch_index};
use crate::{Axis, Mesh, Rank};

#[test]
fn each_micro_batch_is_assigned_exactly_once() {
    for replicas in 1..5 {
        for shards in 1..6 {
            for rounds in 1..6 {
                for accumulation in [Accumulation::Reduce, Accumulation::Unsharded] {
                    let mesh = Mesh::new([(Axis::Replicate, replicas), (Axis::Shard, shards)]).unwrap();
                    let mut seen = vec![0; mesh.world() * rounds];
                    for rank in 0..mesh.world() {
                        for round in 0..rounds {
                            seen[micro_batch_index(mesh, accumulation, rounds, Rank(rank), round)] += 1;
                        }
                    }
                    assert!(seen.iter().all(|&times| times == 1), "{mesh}, {rounds} rounds: {seen:?}");
                }
            }
        }
    }
}

#[test]
fn first_summed_dimension_varies_fastest() {
    let mesh = Mesh::new([(Axis::Replicate, 2), (Axis::Shard, 3)]).unwrap();
    let at = |mode, rank, round| micro_batch_index(mesh, mode, 4, Rank(rank), round);
    assert_eq!([at(Accumulation::Reduce, 0, 0), at(Accumulation::Reduce, 1, 0)], [0, 1]);
    assert_eq!([at(Accumulation::Reduce, 0, 1), at(Accumulation::Reduce, 3, 0)], [3, 12]);
    assert_eq!([at(Accumulation::Unsharded, 0, 1), at(Accumulation::Unsharded, 1, 0)], [1, 4]);
    assert_eq!([at(Accumulation::Unsharded, 3, 0), at(Accumulation::Unsharded, 5, 3)], [12, 23]);
}

#[test]
fn rank_or_round_out_of_range_panics() {
    let mesh = Mesh::new([(Axis::Shard, 2)]).unwrap();
    for (rank, round) in [(2, 0), (0, 3)] {
        let index =
            std::panic::catch_unwind(|| micro_batch_index(mesh, Accumulation::Reduce, 3, Rank(rank), round));
        assert!(index.is_err());
    }
}
