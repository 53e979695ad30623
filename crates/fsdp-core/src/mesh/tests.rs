use super::*;

fn mesh(replicate: usize, shard: usize) -> Mesh {
    Mesh::new([(Axis::Replicate, replicate), (Axis::Shard, shard)]).unwrap()
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
    let mesh = mesh(2, 3);
    let coordinates: Vec<_> =
        (0..6).map(|rank| Axis::ALL.map(|axis| mesh.coordinate(Rank(rank), axis))).collect();
    assert_eq!(coordinates, [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [1, 2]]);
    assert_eq!(mesh.to_string(), "2 x 3 (replicate x shard)");
}

#[test]
fn groups_differ_on_their_axes_only() {
    let mesh = mesh(2, 4);
    assert_eq!(groups(mesh, Group::WORLD), [[0, 1, 2, 3, 4, 5, 6, 7]]);
    assert_eq!(groups(mesh, Group::SHARD), [[0, 1, 2, 3], [4, 5, 6, 7]]);
    assert_eq!(groups(mesh, Group::REPLICATE), [[0, 4], [1, 5], [2, 6], [3, 7]]);
    assert_eq!(groups(mesh, Group::SHARD.neighbors(2)), [[0, 1], [2, 3], [4, 5], [6, 7]]);
    assert_eq!(groups(mesh, Group::WORLD.neighbors(4)), groups(mesh, Group::SHARD));
}

#[test]
fn groups_of_every_mesh_contain_each_rank_once() {
    for (replicate, shard) in (1..5).flat_map(|r| (1..7).map(move |s| (r, s))) {
        let mesh = mesh(replicate, shard);
        let parts = (1..=shard).filter(|n| shard.is_multiple_of(*n)).map(|n| Group::SHARD.neighbors(n));
        for group in [Group::WORLD, Group::SHARD, Group::REPLICATE].into_iter().chain(parts) {
            let mut ranks: Vec<_> = groups(mesh, group).concat();
            ranks.sort_unstable();
            assert_eq!(ranks, (0..mesh.world()).collect::<Vec<_>>(), "{group} of {mesh}");
        }
    }
}

#[test]
fn groups_are_named_by_their_axes() {
    let names = [Group::WORLD, Group::REPLICATE, Group::SHARD.neighbors(2)].map(|group| group.to_string());
    assert_eq!(names, ["replicate x shard", "replicate", "2 ranks of shard"]);
}

#[test]
fn mesh_that_does_not_fit_the_world_is_rejected() {
    assert_eq!(Mesh::of_world(6, 2).unwrap(), mesh(2, 3));
    let refused = |world, replicate| Mesh::of_world(world, replicate).unwrap_err().to_string();
    let expected =
        "a mesh of 2 x 1 (replicate x shard) does not fit 3 ranks: the sizes of its axes multiply to 2";
    assert_eq!(refused(3, 2), expected);
    for (world, replicate) in [(4, 0), (0, 1), (1, 2)] {
        refused(world, replicate);
    }
    Mesh::new([(Axis::Shard, 0)]).unwrap_err();
}
