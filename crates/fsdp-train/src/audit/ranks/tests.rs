use std::sync::Arc;

use fsdp_comm::launch::Launcher;
use fsdp_nn::HostOptions;
use fsdp_sim::{ThreadOptions, Threads};

use super::*;

#[test]
fn every_item_is_dealt_to_one_rank() {
    for (count, world) in (0..8).flat_map(|count| (1..6).map(move |world| (count, world))) {
        let hands: Vec<Vec<usize>> = (0..world).map(|rank| dealt(0..count, rank, world).collect()).collect();
        let mut all = hands.concat();
        all.sort_unstable();
        assert_eq!(all, (0..count).collect::<Vec<_>>());
        let sizes = || hands.iter().map(Vec::len);
        assert!(sizes().max().unwrap() - sizes().min().unwrap() <= 1, "{hands:?}");
    }
}

#[test]
fn sums_over_ranks_are_the_same_bits_on_each() {
    // Sums of these depend on the order of their terms.
    let value = |rank: usize, at: usize| ((rank * 7 + at) as f32).sin() * 10f32.powi((rank * at) as i32 % 9);
    for world in 1..=4 {
        let launcher = Threads::new(ThreadOptions::default(), |_, _| {
            Ok(Arc::new(HostMemory::new(HostOptions::default())?))
        });
        let sums = launcher.launch(world, &|seat| {
            let mut values: Vec<f32> = (0..50).map(|at| value(seat.rank.0, at)).collect();
            let mut ranks = Ranks::new(seat);
            ranks.add_up(&mut values)?;
            Ok::<_, TrainError>((ranks.is_first(), values))
        });
        let sums = sums.unwrap();
        let firsts: Vec<bool> = sums.iter().map(|(is_first, _)| *is_first).collect();
        assert_eq!(firsts, (0..world).map(|rank| rank == 0).collect::<Vec<_>>());
        for (at, sum) in sums[0].1.iter().enumerate() {
            let terms = || (0..world).map(|rank| f64::from(value(rank, at)));
            let error = (f64::from(*sum) - terms().sum::<f64>()).abs();
            assert!(error <= 1e-6 * terms().map(f64::abs).sum::<f64>(), "{world} ranks, element {at}: {sum}");
        }
        let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
        assert!(sums.iter().all(|(_, values)| bits(values) == bits(&sums[0].1)), "{world} ranks");
    }
}
