//! Compares the algorithms with slow, obvious results, and their traffic with the table of the parent module.

use std::time::Duration;

use fsdp_core::comm::{CollectiveKind, Fingerprint, Purpose, ReduceOp};
use fsdp_core::{Rank, tree};
use proptest::prelude::*;

use super::*;
use crate::InMemoryLinks;

/// Runs an algorithm on every rank; returns the results, and the bytes of data that each rank sent.
fn run<T: Send>(
    ranks: usize,
    body: impl Fn(&mut Session<'_>) -> Result<T, CommError> + Sync,
) -> Vec<(T, u64)> {
    let links = InMemoryLinks::new(ranks, Duration::from_secs(60));
    let (kind, purpose) = (CollectiveKind::AllReduce(ReduceOp::Sum), Purpose::Setup);
    let call = Fingerprint { sequence: 0, kind, purpose, unit: None, dtype: DType::F32, elements: 0 };
    std::thread::scope(|scope| {
        let spawn = |rank| {
            let (links, body) = (&links, &body);
            scope.spawn(move || {
                let mut link = links.link(0, Rank(rank));
                let result = body(&mut Session::new(&mut *link, call, &mut Vec::new())).unwrap();
                let sent = links.sent_bytes(Rank(rank));
                (result, sent)
            })
        };
        let threads: Vec<_> = (0..ranks).map(spawn).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Bytes of `f32` values of very different magnitudes.
fn floats(rank: usize, len: usize) -> Vec<u8> {
    let value = |i: usize| ((rank * 31 + i * 17 + 3) as f32).sin() * 10f32.powi((i + 5 * rank) as i32 % 9);
    (0..len).flat_map(|i| value(i).to_le_bytes()).collect()
}

fn tree_sum(ranks: usize, len: usize) -> Vec<u8> {
    tree::fold(0, ranks, &mut |rank| floats(rank, len), &mut |mut left, right| {
        sums::add(DType::F32, &mut left, &right);
        left
    })
}

/// The buffers as parts of one slice each.
fn parts(buffers: &mut [Vec<u8>]) -> Vec<Part<'_>> {
    buffers.iter_mut().map(|buffer| vec![buffer.as_mut_slice()]).collect()
}

type Gather = fn(&mut Session<'_>, &mut [Part<'_>]) -> Result<(), CommError>;

#[test]
fn all_gather_algorithms_support_uneven_parts() {
    let doubling: Gather = all_gather_by_doubling;
    for (algorithm, any_size) in [(doubling, false), (all_gather_around_ring, true)] {
        for ranks in (1..=17usize).filter(|ranks| any_size || ranks.is_power_of_two()) {
            let expected: Vec<_> = (0..ranks).map(|rank| floats(rank, rank % 4)).collect();
            let results = run(ranks, |session| {
                let mut buffers: Vec<_> = expected.iter().map(|part| vec![0; part.len()]).collect();
                buffers[session.rank()] = expected[session.rank()].clone();
                algorithm(session, &mut parts(&mut buffers))?;
                Ok(buffers)
            });
            assert!(results.iter().all(|(buffers, _)| *buffers == expected), "{ranks} ranks");
        }
    }
}

#[test]
fn reduce_scatter_algorithms_match_tree_sum_bitwise() {
    type Algorithm = fn(&mut Session<'_>, DType, &mut [Part<'_>]) -> Result<(), CommError>;
    let halving: Algorithm = reduce_scatter_by_halving;
    for (algorithm, any_size) in [(halving, false), (reduce_scatter_directly, true)] {
        for ranks in (1..=17usize).filter(|ranks| any_size || ranks.is_power_of_two()) {
            let sum = tree_sum(ranks, 3 * ranks);
            let results = run(ranks, |session| {
                let mut input = floats(session.rank(), 3 * ranks);
                // Two slices per part.
                let mut parts: Vec<Part<'_>> = input
                    .chunks_mut(12)
                    .map(|part| part.split_at_mut(4))
                    .map(|(first, second)| vec![first, second])
                    .collect();
                algorithm(session, DType::F32, &mut parts)?;
                Ok(parts[session.rank()].concat())
            });
            for (rank, (part, _)) in results.into_iter().enumerate() {
                assert_eq!(part, sum[12 * rank..12 * rank + 12], "rank {rank} of {ranks}");
            }
        }
    }
}

#[test]
fn gather_and_scatter_send_n_minus_one_parts_per_rank() {
    for ranks in 1..=9usize {
        let expected = (ranks as u64 - 1) * 40;
        let gathered = run(ranks, |session| all_gather(session, &mut parts(&mut vec![vec![0; 40]; ranks])));
        assert!(gathered.iter().all(|(_, sent)| *sent == expected));
        let reduced = run(ranks, |session| {
            reduce_scatter(session, DType::F32, &mut parts(&mut vec![vec![0; 40]; ranks]))
        });
        assert!(reduced.iter().all(|(_, sent)| *sent == expected));
    }
}

#[test]
fn broadcast_from_every_root_reaches_all_ranks() {
    for ranks in 1..=9 {
        for root in 0..ranks {
            let results = run(ranks, |session| {
                let mut message = floats(session.rank(), 3);
                broadcast(session, root, &mut message)?;
                Ok(message)
            });
            assert!(results.iter().all(|(message, _)| *message == floats(root, 3)), "{root} of {ranks}");
        }
    }
}

#[test]
fn mismatched_broadcast_root_is_an_error_on_all_ranks() {
    for ranks in 2..=5 {
        let links = InMemoryLinks::new(ranks, Duration::from_secs(60));
        std::thread::scope(|scope| {
            let spawn = |rank: usize| {
                let links = &links;
                scope.spawn(move || {
                    let mut link = links.link(0, Rank(rank));
                    let root = rank / (ranks - 1);
                    let (kind, purpose) = (CollectiveKind::Broadcast { root: root as u32 }, Purpose::Setup);
                    let call = Fingerprint {
                        sequence: 0,
                        kind,
                        purpose,
                        unit: None,
                        dtype: DType::F32,
                        elements: 1,
                    };
                    let result = broadcast(
                        &mut Session::new(&mut *link, call, &mut Vec::new()),
                        root,
                        &mut floats(rank, 1),
                    );
                    result.inspect_err(|error| link.alarm().raise(error.clone()))
                })
            };
            let threads: Vec<_> = (0..ranks).map(spawn).collect();
            for thread in threads {
                let error = thread.join().unwrap().unwrap_err();
                assert!(matches!(error, CommError::Mismatch { .. }), "{error}");
            }
        });
    }
}

#[test]
fn wrong_part_length_error_names_sender() {
    for ranks in [2, 3] {
        let results = run(ranks, |session| {
            let len = if session.rank() == 1 { 8 } else { 4 };
            Ok(reduce_scatter(session, DType::F32, &mut parts(&mut vec![vec![0; len]; ranks])))
        });
        let names_sender =
            |result: &Result<_, _>| matches!(result, Err(CommError::Transport { rank: Rank(1), .. }));
        assert!(results.iter().any(|(result, _)| names_sender(result)), "{results:?}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn all_reduce_matches_tree_sum_bitwise_on_all_ranks(ranks in 1usize..=12, len in 0usize..40) {
        let expected = tree_sum(ranks, len);
        let results = run(ranks, |session| {
            let mut data = floats(session.rank(), len);
            all_reduce(session, DType::F32, &mut data)?;
            Ok(data)
        });
        for (sum, _) in results {
            prop_assert_eq!(&sum, &expected);
        }
    }
}
