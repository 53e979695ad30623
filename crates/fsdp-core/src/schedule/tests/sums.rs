//! Proves that gradients are added by the tree, from the additions of a schedule as expressions over micro-batches.

use std::collections::BTreeMap;

use crate::schedule::{
    Accumulation, AccumulationOrder, BufferId, OpKind, Policy, Schedule, micro_batch_index,
};
use crate::testing::{Setup, Sketch};
use crate::{Axis, Mesh, Rank};

/// The contents of a buffer on a rank. Programs are the same on all ranks, so one expression describes all of them.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Local {
    /// The gradient of the micro-batch that the rank runs in this round.
    Round(usize),
    Add(Box<Local>, Box<Local>),
    /// The sum over the ranks of a replica, of which each rank has a part.
    OverShards(Box<Local>),
    /// The sum over replicas.
    OverReplicas(Box<Local>),
}

/// A sum of micro-batches in data order.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Tree {
    MicroBatch(usize),
    Add(Box<Tree>, Box<Tree>),
}

fn add(left: Tree, right: Tree) -> Tree {
    Tree::Add(Box::new(left), Box::new(right))
}

/// The tree over some sums, by its definition: the left subtree has the largest power of two of them that is not all.
fn tree(sums: &[Tree]) -> Tree {
    if let [one] = sums {
        return one.clone();
    }
    let mut left = 1;
    while left * 2 < sums.len() {
        left *= 2;
    }
    add(tree(&sums[..left]), tree(&sums[left..]))
}

/// The sum in order, one after the other.
fn running(sums: &[Tree]) -> Tree {
    let [first, rest @ ..] = sums else { panic!("there is at least one sum") };
    rest.iter().fold(first.clone(), |sum, next| add(sum, next.clone()))
}

/// Runs the operations on gradients, and returns what the update of each unit reads.
fn totals(schedule: &Schedule) -> Vec<Local> {
    let mut held: BTreeMap<BufferId, Local> = BTreeMap::new();
    let (mut round, mut totals) = (0, Vec::new());
    for op in &schedule.ops {
        let take = |held: &mut BTreeMap<BufferId, Local>, id| held.remove(&id).expect("a gradient is there");
        match op.kind {
            OpKind::BeginMicroBatch(now) => round = now.0,
            OpKind::OpenGradient(_) => {
                held.extend(op.writes.iter().map(|&id| (id, Local::Round(round))));
            }
            OpKind::Add { .. } => {
                for (&from, &into) in op.reads.iter().zip(&op.writes) {
                    let (right, left) = (take(&mut held, from), take(&mut held, into));
                    held.insert(into, Local::Add(Box::new(left), Box::new(right)));
                }
            }
            OpKind::ReduceScatter { .. } => {
                for (&from, &to) in op.reads.iter().zip(&op.writes) {
                    let whole = take(&mut held, from);
                    held.insert(to, Local::OverShards(Box::new(whole)));
                }
            }
            OpKind::AllReduce { .. } => {
                for &id in &op.writes {
                    let sharded = take(&mut held, id);
                    held.insert(id, Local::OverReplicas(Box::new(sharded)));
                }
            }
            OpKind::Update(unit) => {
                let gradients = schedule.lasting.units[unit.0].gradient.len();
                totals.extend(op.reads[..gradients].iter().map(|id| held[id].clone()));
            }
            _ => {}
        }
    }
    totals
}

/// Expands a local sum to a sum of micro-batches. Communicators add by the tree over ranks.
fn spread(local: &Local, mesh: Mesh, accumulation: Accumulation, rounds: usize, rank: Rank) -> Tree {
    let on = |local: &Local, rank| spread(local, mesh, accumulation, rounds, rank);
    let (replica, shard) = (mesh.coordinate(rank, Axis::Replicate), mesh.coordinate(rank, Axis::Shard));
    match local {
        Local::Round(round) => Tree::MicroBatch(micro_batch_index(mesh, accumulation, rounds, rank, *round)),
        Local::Add(left, right) => add(on(left, rank), on(right, rank)),
        Local::OverShards(whole) => {
            let ranks =
                (0..mesh.size(Axis::Shard)).map(|shard| Rank(replica * mesh.size(Axis::Shard) + shard));
            tree(&ranks.map(|rank| on(whole, rank)).collect::<Vec<_>>())
        }
        Local::OverReplicas(sharded) => {
            let ranks =
                (0..mesh.size(Axis::Replicate)).map(|replica| Rank(replica * mesh.size(Axis::Shard) + shard));
            tree(&ranks.map(|rank| on(sharded, rank)).collect::<Vec<_>>())
        }
    }
}

/// The expected sum: rounds by the tree or in order, ranks by the tree, nested as the accumulation defines.
fn expected(mesh: Mesh, policy: &Policy, rounds: usize) -> Tree {
    let over_rounds = |sums: &[Tree]| match policy.accumulation_order {
        AccumulationOrder::Tree => tree(sums),
        AccumulationOrder::Running => running(sums),
    };
    let accumulation = policy.accumulation;
    let leaf = |replica: usize, shard: usize, round| {
        let rank = Rank(replica * mesh.size(Axis::Shard) + shard);
        Tree::MicroBatch(micro_batch_index(mesh, accumulation, rounds, rank, round))
    };
    let of_replica = |replica| match accumulation {
        Accumulation::Reduce => {
            let over_shards = |round| {
                tree(
                    &(0..mesh.size(Axis::Shard)).map(|shard| leaf(replica, shard, round)).collect::<Vec<_>>(),
                )
            };
            over_rounds(&(0..rounds).map(over_shards).collect::<Vec<_>>())
        }
        Accumulation::Unsharded => {
            let of_shard = |shard| {
                over_rounds(&(0..rounds).map(|round| leaf(replica, shard, round)).collect::<Vec<_>>())
            };
            tree(&(0..mesh.size(Axis::Shard)).map(of_shard).collect::<Vec<_>>())
        }
    };
    tree(&(0..mesh.size(Axis::Replicate)).map(of_replica).collect::<Vec<_>>())
}

#[test]
fn additions_follow_tree_on_every_mesh_up_to_64_micro_batches() {
    let sketch = Sketch { width: 1, vocabulary: 1, ..Sketch::plain(1) };
    let divisors = |count: usize| (1..=count).filter(move |n| count.is_multiple_of(*n));
    let (mut meshes, mut perfect) = (0, 0);
    for micro_batches in 1..=64 {
        for replicas in divisors(micro_batches) {
            for shards in divisors(micro_batches / replicas) {
                let (mesh, rounds) = (
                    Mesh::new([(Axis::Replicate, replicas), (Axis::Shard, shards)]).unwrap(),
                    micro_batches / (replicas * shards),
                );
                meshes += 1;
                for accumulation in [Accumulation::Reduce, Accumulation::Unsharded] {
                    for accumulation_order in [AccumulationOrder::Tree, AccumulationOrder::Running] {
                        let policy = Policy { accumulation, accumulation_order, ..Policy::default() };
                        let built = Setup { policy, mesh, rounds, ..Setup::plain(sketch.clone()) }.build();
                        let totals = totals(&built.step());
                        let expected = expected(mesh, &policy, rounds);
                        let first = spread(&totals[0], mesh, accumulation, rounds, Rank(0));
                        assert!(first == expected, "{mesh}, {rounds} rounds, {policy:?}: {first:?}");
                        assert!(totals.len() > 1 && totals.iter().all(|total| *total == totals[0]));
                        if micro_batches.is_power_of_two() && accumulation_order == AccumulationOrder::Tree {
                            let all: Vec<Tree> = (0..micro_batches).map(Tree::MicroBatch).collect();
                            assert_eq!(first, tree(&all), "the same bits on every mesh");
                            perfect += 1;
                        }
                    }
                }
            }
        }
    }
    assert!(meshes > 500 && perfect == 2 * 84, "{meshes} meshes, {perfect} perfect trees");
}
