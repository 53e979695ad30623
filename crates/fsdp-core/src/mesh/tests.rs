use super::*;

fn mesh(replicate: usize, shard: usize) -> Mesh {
    with_context(replicate, shard, 1)
}

fn with_context(replicate: usize, shard: usize, context: usize) -> Mesh {
    Mesh::new([(Axis::Replicate, replicate), (Axis::Shard, shard), (Axis::Context, context)]).unwrap()
}

/// All groups of a mesh, as lists of ranks, in the order of their numbers.
fn groups(mesh: Mesh, group: Group) -> Vec<Vec<usize>> {
    let mut found = vec![Vec::new(); mesh.world() / mesh.group_size(group)];
    for rank in (0..mesh.world()).map(Rank) {
        let members = &mut found[mesh.group_of(rank, group)];
        assert_eq!(mesh.index_in_group(rank, group), members.len(), "{rank} of {group}");
        members.push(rank.0);
    }
    found
}

#[test]
fn coordinates_count_up_from_the_innermost_axis() {
    let mesh = with_context(2, 2, 3);
    let coordinates: Vec<_> =
        (0..12).map(|rank| Axis::ALL.map(|axis| mesh.coordinate(Rank(rank), axis))).collect();
    let expected = (0..2).flat_map(|r| (0..2).flat_map(move |s| (0..3).map(move |c| [r, s, c])));
    assert_eq!(coordinates, expected.collect::<Vec<_>>());
    assert_eq!(mesh.to_string(), "2 x 2 x 3 (replicate x shard x context)");
    assert_eq!(with_context(2, 3, 1).to_string(), "2 x 3 (replicate x shard)");
}

#[test]
fn groups_differ_on_their_axes_only() {
    let mesh = mesh(2, 4);
    assert_eq!(groups(mesh, Group::WORLD), [[0, 1, 2, 3, 4, 5, 6, 7]]);
    assert_eq!(groups(mesh, Group::SHARDS), [[0, 1, 2, 3], [4, 5, 6, 7]]);
    assert_eq!(groups(mesh, Group::REPLICATE), [[0, 4], [1, 5], [2, 6], [3, 7]]);
    assert_eq!(groups(mesh, Group::SHARDS.neighbors(2)), [[0, 1], [2, 3], [4, 5], [6, 7]]);
    assert_eq!(groups(mesh, Group::WORLD.neighbors(4)), groups(mesh, Group::SHARDS));
}

/// Parameters are sharded over the context axis as well, whose ranks share micro-batches.
#[test]
fn ranks_of_the_context_axis_hold_shards_and_share_micro_batches() {
    let mesh = with_context(2, 2, 2);
    assert_eq!(groups(mesh, Group::CONTEXT), [[0, 1], [2, 3], [4, 5], [6, 7]]);
    assert_eq!(groups(mesh, Group::SHARDS), [[0, 1, 2, 3], [4, 5, 6, 7]]);
    assert_eq!(groups(mesh, Group::REPLICATE), [[0, 4], [1, 5], [2, 6], [3, 7]]);
    assert_eq!((mesh.shards(), mesh.dp_degree()), (4, 4));
    let ranks = || (0..8).map(Rank);
    assert!(ranks().map(|rank| mesh.shard(rank)).eq([0, 1, 2, 3, 0, 1, 2, 3]));
    assert!(ranks().map(|rank| mesh.dp_rank(rank)).eq([0, 0, 1, 1, 2, 2, 3, 3]));
}

/// The expert axis divides the ranks that hold all shards; those at the same place of it hold the same experts.
#[test]
fn expert_axis_is_carved_out_of_shards() {
    let mesh = with_context(2, 2, 2).with_expert(2).unwrap();
    assert_eq!(groups(mesh, Group::EXPERT), [[0, 1], [2, 3], [4, 5], [6, 7]]);
    assert_eq!(groups(mesh, Group::EXPERT_SHARDS), [[0, 2], [1, 3], [4, 6], [5, 7]]);
    assert_eq!(groups(mesh, Group::SHARDS), [[0, 1, 2, 3], [4, 5, 6, 7]]);
    assert_eq!((mesh.world(), mesh.expert(), mesh.dp_degree()), (8, 2, 4));
    assert_eq!(mesh.to_string(), "2 x 2 x 2 (replicate x shard x context) with 2 (expert)");
    let wide = with_context(1, 8, 1).with_expert(2).unwrap();
    assert_eq!(groups(wide, Group::EXPERT_SHARDS), [[0, 2, 4, 6], [1, 3, 5, 7]]);
    assert_eq!(groups(wide, Group::EXPERT_SHARDS.neighbors(2)), [[0, 2], [4, 6], [1, 3], [5, 7]]);
    let refused = |expert| with_context(2, 2, 2).with_expert(expert).unwrap_err().to_string();
    assert!(refused(3).ends_with("an expert axis of 3, which has to divide the 4 ranks of shard x context"));
    refused(0);
}

#[test]
fn groups_of_every_mesh_contain_each_rank_once() {
    let sizes = (1..4).flat_map(|r| (1..6).flat_map(move |s| (1..4).map(move |c| (r, s, c))));
    for (replicate, shard, context) in sizes {
        let (mesh, shards) = (with_context(replicate, shard, context), shard * context);
        let parts = (1..=shards).filter(|n| shards.is_multiple_of(*n)).map(|n| Group::SHARDS.neighbors(n));
        let expert = (1..=shards).filter(|n| shards.is_multiple_of(*n)).max_by_key(|n| n % 3).unwrap();
        let mesh = mesh.with_expert(expert).unwrap();
        let all = [
            Group::WORLD,
            Group::SHARDS,
            Group::REPLICATE,
            Group::CONTEXT,
            Group::EXPERT,
            Group::EXPERT_SHARDS,
        ];
        for group in all.into_iter().chain(parts) {
            let mut ranks: Vec<_> = groups(mesh, group).concat();
            ranks.sort_unstable();
            assert_eq!(ranks, (0..mesh.world()).collect::<Vec<_>>(), "{group} of {mesh}");
            let first = &groups(mesh, group)[0];
            let steps = first.windows(2).map(|pair| pair[1] - pair[0]);
            assert!(steps.clone().all(|step| step == mesh.stride(group)), "{group} of {mesh}: {first:?}");
        }
    }
}

#[test]
fn groups_are_named_by_their_axes() {
    let groups = [Group::WORLD, Group::REPLICATE, Group::SHARDS.neighbors(2), Group::CONTEXT];
    let names = groups.map(|group| group.to_string());
    assert_eq!(names, ["replicate x shard", "replicate", "2 ranks of shard", "context"]);
    let names = [Group::EXPERT, Group::EXPERT_SHARDS].map(|group| group.to_string());
    assert_eq!(names, ["expert", "shard, same experts"]);
}

#[test]
fn mesh_that_does_not_fit_the_world_is_rejected() {
    assert_eq!(Mesh::of_world(6, 2, 1).unwrap(), mesh(2, 3));
    assert_eq!(Mesh::of_world(12, 2, 3).unwrap(), with_context(2, 2, 3));
    Mesh::of_world(6, 2, 2).unwrap_err();
    let refused = |world, replicate| Mesh::of_world(world, replicate, 1).unwrap_err().to_string();
    let expected =
        "a mesh of 2 x 1 (replicate x shard) does not fit 3 ranks: the sizes of its axes multiply to 2";
    assert_eq!(refused(3, 2), expected);
    for (world, replicate) in [(4, 0), (0, 1), (1, 2)] {
        refused(world, replicate);
    }
    Mesh::new([(Axis::Shard, 0)]).unwrap_err();
}
