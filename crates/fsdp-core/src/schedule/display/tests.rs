use crate::mesh::{Axis, Mesh};
use crate::schedule::{
    Accumulation, AccumulationOrder, Checkpointing, Policy, Reshard, Round, Section, SectionKind,
};
use crate::testing::{Frozen, Setup, Sketch};

fn render(setup: &Setup) -> String {
    let built = setup.build();
    built.step().render(&built.spec, &built.layout)
}

#[test]
fn tiny_schedule_renders_as_expected() {
    let setup = Setup {
        mesh: Mesh::new([(Axis::Replicate, 2), (Axis::Shard, 2)]).unwrap(),
        ..Setup::plain(Sketch::plain(1))
    };
    let expected = "\
prologue
    0  compute  begin step
micro-batch 0
    1  compute  begin micro-batch 0
    2  gather   all-gather (root) -> slot 0, for forward  (after 0)
    3  gather   all-gather layers.0 -> slot 1, for forward
    4  compute  forward embed  (after 2)
    5  compute  forward layers.0  (after 3)
    6  compute  reshard layers.0
    7  gather   all-gather layers.0 -> slot 1, for backward  (after 6)
    8  compute  open gradient (root) in gradient slot 0
    9  compute  forward-backward head
   10  compute  open gradient layers.0 in gradient slot 1
   11  compute  backward layers.0  (after 7)
   12  compute  reshard layers.0
   13  compute  close gradient layers.0
   14  reduce   reduce-scatter layers.0 -> sharded gradient  (after 13)
   15  compute  backward embed
   16  compute  reshard (root)
   17  compute  close gradient (root)
   18  reduce   reduce-scatter (root) -> sharded gradient  (after 17)
   19  reduce   all-reduce layers.0 over replicate
   20  reduce   all-reduce (root) over replicate
   21  reduce   square norm layers.0
   22  reduce   square norm (root)
epilogue
   23  reduce   all-reduce scalars
   24  compute  update (root)  (after 23)
   25  compute  update layers.0
";
    assert_eq!(render(&setup), expected);
}

#[track_caller]
fn assert_lines(setup: &Setup, lines: &[&str]) {
    let text = render(setup);
    for line in lines {
        let found = |found: &str| found.split("  (after").next().is_some_and(|op| op.ends_with(line));
        assert!(text.lines().any(found), "no `{line}` in\n{text}");
    }
}

#[test]
fn rendered_operations_show_policy_details() {
    let policy = Policy {
        reshard_after_forward: Reshard::ToGroup(2),
        checkpointing: Checkpointing::Full,
        param_dtype: crate::DType::Bf16,
        ..Policy::default()
    };
    let sketch = Sketch { frozen: Frozen::Below(1), ..Sketch::plain(2) };
    let setup =
        Setup { policy, phases: 1, mesh: Mesh::new([(Axis::Shard, 4)]).unwrap(), ..Setup::plain(sketch) };
    assert_lines(
        &setup,
        &[
            "compute  forward embed",
            "compute  forward layers.1 (checkpointed)",
            "compute  recompute layers.1",
            "compute  keep sub-shard layers.1",
            "gather   all-gather layers.1 -> slot 1 from sub-shard over 2 ranks of shard, for backward",
            "compute  statistics 0 of layers.1",
            "reduce   all-reduce statistics 0",
        ],
    );
    let policy = Policy { checkpointing: Checkpointing::Selective, ..Policy::default() };
    assert_lines(
        &Setup { policy, ..Setup::plain(Sketch::plain(1)) },
        &["compute  forward layers.0 (checkpointed, products kept)", "compute  recompute layers.0"],
    );
    let policy = Policy { accumulation: Accumulation::Unsharded, ..Policy::default() };
    assert_lines(
        &Setup { policy, rounds: 2, ..Setup::plain(Sketch::plain(1)) },
        &[
            "compute  open gradient layers.0 in whole sum 0",
            "compute  open gradient layers.0 in gradient slot 1",
            "compute  add layers.0: gradient slot 1 into whole sum 0",
        ],
    );
}

fn titles(text: &str) -> Vec<&str> {
    text.lines().filter(|line| !line.starts_with(' ')).collect()
}

#[test]
fn identical_micro_batches_are_collapsed_with_their_sums() {
    let running = Policy { accumulation_order: AccumulationOrder::Running, ..Policy::default() };
    let one = "       micro-batch 1 adds, for each unit, sum 0 into sharded gradient";
    for (policy, sums) in [
        (running, [one, &one.replace('1', "2"), &one.replace('1', "3"), &one.replace('1', "4")].as_slice()),
        (
            Policy::default(),
            &[one, "       micro-batch 3 adds, for each unit, sum 1 into sum 0, sum 0 into sharded gradient"],
        ),
    ] {
        let setup = Setup { rounds: 6, policy, ..Setup::plain(Sketch::plain(2)) };
        let (text, built) = (render(&setup), setup.build());
        let titles = titles(&text);
        let alike = "micro-batches 0 to 4 (alike except for the sums they add)";
        assert_eq!(titles, ["prologue", alike, "micro-batch 5", "epilogue"]);
        let lines: Vec<&str> = text.lines().filter(|line| line.contains(" adds, for each unit, ")).collect();
        assert_eq!(lines, sums);
        let is_shown = |section: &&Section| !matches!(section.kind, SectionKind::MicroBatch(Round(1..=4)));
        let schedule = built.step();
        let shown: usize =
            schedule.sections.iter().filter(is_shown).map(|section| section.end - section.start).sum();
        assert_eq!(text.lines().count(), titles.len() + shown + sums.len());
        // The first gather of every batch waits for the operation before the batch.
        let evaluation = built.evaluation().render(&built.spec, &built.layout);
        assert!(evaluation.contains("micro-batches 0 to 5 (alike)"), "{evaluation}");
    }
}
