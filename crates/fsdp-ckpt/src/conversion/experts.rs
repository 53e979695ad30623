//! Brings the experts of a model into the requested form.

use super::{Conversion, Part};
use crate::{
    checkpoint::{Checkpoint, Experts, Role, published_stack},
    diff,
    error::Error,
    transfer::Options,
};

/// Returns what is to be converted with its experts in the form that was asked for, or in stacks if all other programs
/// have them so; `None` if neither is the case.
///
/// # Errors
/// [`Error::BadRequest`] if there is nothing to change, or if the form cannot hold what the experts have;
/// those of reading the values that must be the same.
pub(super) fn in_form(
    checkpoint: &Checkpoint,
    conversion: &Conversion,
    options: &Options,
) -> Result<Option<Checkpoint>, Error> {
    let is_unpublished = || checkpoint.parameters().any(|name| published_stack(&name).is_some());
    let form = match conversion.experts {
        Some(form) => form,
        None if is_unpublished() => Experts::Fused,
        None => return Ok(None),
    };
    let mut part = checkpoint.clone();
    if conversion.part == Part::Model {
        // What is not converted need not have the form.
        part.tensors.retain(|_, tensor| tensor.role == Role::Model);
        part.values.retain(|_, object| object.role == Role::Model);
    }
    if form == Experts::Fused {
        check_single_values(&part, options)?;
    }
    let viewed = part.clone().with_experts(form)?;
    if viewed.tensors == part.tensors {
        let reason = "it has no experts in the other form; omit --experts";
        return Err(Error::bad_request(&checkpoint.path, reason));
    }
    Ok(Some(viewed))
}

/// Checks that step counts, of which stacked experts have only one, are the same for all experts of a layer.
fn check_single_values(checkpoint: &Checkpoint, options: &Options) -> Result<(), Error> {
    for (stack, names) in checkpoint.single_values_of_experts() {
        for other in &names[1..] {
            if !diff::within(checkpoint, [names[0], other], options)?.is_equal() {
                let reason = format!(
                    "`{}` and `{other}` differ, and stacked experts (`{stack}`) have only one: PyTorch could not continue \
                     them as they are; `--only model` stacks the weights alone",
                    names[0]
                );
                return Err(Error::bad_request(&checkpoint.path, reason));
            }
        }
    }
    Ok(())
}
