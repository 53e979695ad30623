//! Whether labels are shifted already, as they show themselves.

/// How labels lie beside the tokens, of those that could be either the token at their position or the next one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Labelled {
    all: usize,
    /// Labels that are the token at their position.
    same: usize,
    /// Labels that are the next token of the row.
    next: usize,
}

/// So few labels may be those of the other convention by chance.
const FEW: usize = 4;

impl Labelled {
    pub(super) fn of(ids: &[u32], labels: &[Option<u32>], seq: usize) -> Self {
        let mut found = Self::default();
        for (at, label) in labels.iter().enumerate() {
            if let Some(label) = label
                && !(at + 1).is_multiple_of(seq)
                && ids[at] != ids[at + 1]
            {
                found.all += 1;
                found.same += usize::from(*label == ids[at]);
                found.next += usize::from(*label == ids[at + 1]);
            }
        }
        found
    }
}

/// What is wrong if all labels of a file are shifted although they should not be, or the other way round. Without this, a
/// program that shifts labels which its data has shifted would do the same as the audit, which would find nothing.
pub(super) fn fault(labels: &[Labelled], shifted: bool) -> Option<&'static str> {
    let sum = |of: fn(&Labelled) -> usize| labels.iter().map(of).sum::<usize>();
    let (all, same, next) = (sum(|found| found.all), sum(|found| found.same), sum(|found| found.next));
    match shifted {
        _ if all <= FEW => None,
        false if next == all => Some(
            "each label is the token after its position already: pass --shifted (if the model of the program shifts labels, too, \
             the audit will say so)",
        ),
        true if same == all => {
            Some("each label is the token at its position, so they are not shifted: leave out --shifted")
        }
        _ => None,
    }
}
