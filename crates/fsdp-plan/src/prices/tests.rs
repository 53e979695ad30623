use fsdp_core::{Axis, Mesh};
use proptest::prelude::*;

use super::*;
use crate::work::Product;

fn on<T>(name: &str, price: impl FnOnce(&Prices<'_>) -> T) -> T {
    let cluster = Cluster::known(name).unwrap();
    let round = [("products.hopper", 0.70), ("short_sums", 60.0), ("network", 0.80), ("congestion", 0.04)];
    let constants =
        round.iter().fold(Constants::fitted(), |constants, (name, value)| constants.with(name, *value));
    let setting = Setting { world: 8, dtype: DType::Bf16, transport: "nccl" };
    price(&Prices::new(&cluster, &constants, Software::OURS, setting).unwrap())
}

#[test]
fn large_product_reaches_fitted_fraction_of_peak() {
    // 33 x 32 tiles on 132 multiprocessors make 8 full waves; the sums are so long that their ends cost nothing.
    let product = Product { m: 128 * 33, n: 256 * 32, k: 1 << 20, count: 1.0 };
    let seconds = on("h100-sxm", |prices| prices.product(&product));
    let expected = product.flops() / (989.4e12 * 0.70) * (1.0 + 60.0 / (256.0 * 32.0));
    assert!((seconds / expected - 1.0).abs() < 1e-4, "{seconds} {expected}");
}

#[test]
fn thin_product_is_bound_by_memory_bandwidth() {
    let product = Product { m: 1, n: 8192, k: 8192, count: 1.0 };
    let seconds = on("h100-sxm", |prices| prices.product(&product));
    let bytes = 2.0 * (8192.0 + 8192.0 + 8192.0 * 8192.0);
    assert!((seconds / (bytes / (3.35e12 * 0.85)) - 1.0).abs() < 1e-9);
}

#[test]
fn large_gather_is_bound_by_slowest_link() {
    let bytes = 64e9;
    let in_node = on("h100-sxm", |prices| prices.collective(Collective::AllGather, bytes, Ring::near(8)));
    assert!((in_node.seconds / (bytes * 7.0 / 8.0 / (450e9 * 0.79)) - 1.0).abs() < 0.01);
    assert_eq!(in_node.link, Some(NODE_LINK));
    let between = on("h100-sxm", |prices| prices.collective(Collective::AllGather, bytes, Ring::near(16)));
    let network = 400e9 * 0.80 * (1.0 - 0.04);
    assert!((between.seconds / (bytes * 15.0 / 16.0 / network) - 1.0).abs() < 0.01);
    assert_eq!(between.link, Some(NETWORK));
    assert_eq!(
        on("h100-sxm", |prices| prices.collective(Collective::AllGather, bytes, Ring::near(1))),
        Work::default()
    );
}

/// Ranks that have other experts are in rings of their own, which share the network of a node: dividing experts within nodes moves
/// no fewer bytes between them.
#[test]
fn rings_of_one_node_share_its_network() {
    let bytes = 64e9;
    let seconds = |bytes, ranks, stride| {
        on("h100-sxm", |prices| prices.collective(Collective::AllGather, bytes, Ring { ranks, stride }))
            .seconds
    };
    let (whole, quarter) = (seconds(bytes, 64, 1), seconds(bytes / 4.0, 16, 4));
    assert!((quarter / whole - 15.0 / 16.0 * 64.0 / 63.0).abs() < 0.01, "{quarter} {whole}");
    // Within a node, there are fewer bytes for each link.
    assert!((seconds(bytes / 2.0, 4, 2) / seconds(bytes, 8, 1) - 0.5 * 3.0 / 4.0 * 8.0 / 7.0).abs() < 0.01);
}

#[test]
fn rings_are_on_the_nodes_of_their_ranks() {
    let nodes = |ranks, stride| Ring { ranks, stride }.nodes(8);
    assert_eq!([nodes(8, 1), nodes(4, 2), nodes(9, 1), nodes(2, 8)], [1, 1, 2, 2]);
    // Nodes between two ranks have none.
    assert_eq!([nodes(2, 16), nodes(4, 8), nodes(8, 4)], [2, 4, 4]);
    // At most the devices of a node share its network.
    let seconds = |stride| {
        on("h100-sxm", |prices| prices.collective(Collective::AllGather, 8e9, Ring { ranks: 2, stride }))
            .seconds
    };
    assert_eq!(seconds(8), seconds(16));
}

#[test]
fn replicated_shards_split_network_bandwidth() {
    let bytes = 8e9;
    let seconds = on("h100-sxm", |prices| {
        prices.replicated(bytes, Mesh::new([(Axis::Replicate, 4), (Axis::Shard, 8)]).unwrap())
    })
    .seconds;
    let expected = 2.0 * bytes * 3.0 / 4.0 / (400e9 / 8.0 * 0.80);
    assert!((seconds / expected - 1.0).abs() < 0.01, "{seconds} {expected}");
    assert_eq!(
        on("h100-sxm", |prices| prices.replicated(bytes, Mesh::new([(Axis::Shard, 8)]).unwrap())),
        Work::default()
    );
}

#[test]
fn every_generation_is_fitted_or_has_stand_in() {
    for name in crate::cluster::names() {
        let cluster = Cluster::known(name).unwrap();
        let generation = stand_in(&cluster.generation).unwrap_or(&cluster.generation);
        assert!(stand_in(generation).is_none(), "{name}");
        let setting = Setting { world: 8, dtype: DType::F32, transport: "nccl" };
        Prices::new(&cluster, &Constants::fitted(), Software::OURS, setting).unwrap();
    }
}

proptest! {
    #[test]
    fn more_work_never_takes_less_time(bytes in 1.0f64..1e11, more in 1.01f64..10.0, group in 2usize..1024, m in 1usize..20_000) {
        let (less, longer) = on("a100-80-sxm", |prices| {
            (prices.collective(Collective::AllGather, bytes, Ring::near(group)).seconds, prices.collective(Collective::AllGather, bytes * more, Ring::near(group)).seconds)
        });
        prop_assert!(less < longer);
        let product = |m| on("a100-80-sxm", |prices| prices.product(&Product { m, n: 4096, k: 4096, count: 1.0 }));
        // The time has a step at every full wave of tiles, within which more rows cost nothing.
        prop_assert!(product(m) <= product(2 * m) * 1.0001);
    }
}
