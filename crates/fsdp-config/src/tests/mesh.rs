//! The axes of the mesh, and the chunks of samples.

use super::*;

#[test]
fn chunks_are_those_of_the_context_axis_unless_set() {
    let chunks = |overrides: &[&str]| {
        parse(MINIMAL, &[&["run.ranks=4"], overrides].concat()).map(|loaded| loaded.config.fsdp.chunks())
    };
    assert_eq!(chunks(&[]).unwrap(), 1);
    assert_eq!(chunks(&["fsdp.mesh={ context = 2 }"]).unwrap(), 2);
    assert_eq!(chunks(&["fsdp.mesh={ context = 2 }", "fsdp.chunks.context=8"]).unwrap(), 8);
    let refusal = |overrides: &[&str]| chunks(overrides).unwrap_err().to_string();
    let fewer = refusal(&["fsdp.mesh={ context = 4 }", "fsdp.chunks.context=2"]);
    assert!(
        fewer.contains("`fsdp.mesh.context` = 4") && fewer.contains("fsdp.chunks.context = 2"),
        "{fewer}"
    );
    let odd = refusal(&["fsdp.chunks.context=3"]);
    assert!(odd.contains("fsdp.chunks.context") && odd.contains("a power of two"), "{odd}");
    let long = refusal(&["fsdp.chunks.context=16"]);
    assert!(long.contains("data.seq_len"), "{long}");
}

#[test]
fn chunks_stay_where_ranks_change() {
    let config = parse(MINIMAL, &["run.ranks=4", "fsdp.mesh={ context = 4 }"]).unwrap().config;
    for (world, context) in [(1, 1), (2, 2), (4, 4)] {
        let config = config.at(world).unwrap();
        assert_eq!((config.fsdp.mesh.context, config.fsdp.chunks()), (context, 4), "at {world} ranks");
        assert_eq!(parse(&config.to_toml(), &[]).unwrap().config, config);
    }
}

#[test]
fn axes_of_the_mesh_must_multiply_to_the_ranks() {
    let mesh = |replicate: usize, shard: usize| {
        parse(FULL, &["run.ranks=8", &format!("fsdp.mesh={{replicate={replicate}, shard={shard}}}")])
    };
    let config = mesh(2, 4).unwrap().config;
    assert_eq!(config.fsdp.mesh.replicate, 2);
    assert_eq!(parse(&config.to_toml(), &["run.ranks=4"]).unwrap().config.fsdp.mesh.replicate, 2);
    let error = mesh(2, 8).unwrap_err().to_string();
    assert!(
        error.contains("fsdp.mesh.shard") && error.contains("4 (run.ranks = 8 / fsdp.mesh.replicate = 2)"),
        "{error}"
    );
}
