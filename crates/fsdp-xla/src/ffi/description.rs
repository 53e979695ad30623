//! What a plugin says of a device.

use super::api::{self, Arguments, Plugin, Word, attributes, text};
use crate::error::XlaError;

/// The attribute of devices with the bytes of memory that programs may use.
const MEMORY: &str = "device_memory_bytes_limit";

/// A kind of devices.
#[derive(Clone, Debug, Default)]
pub(crate) struct DeviceKind {
    /// Its name.
    pub(crate) name: String,
    /// Bytes of memory that programs may use, if the plugin says so.
    pub(crate) memory: Option<u64>,
}

impl DeviceKind {
    /// That of a `PJRT_DeviceDescription`, which has to be one of the plugin's that is still there.
    ///
    /// # Errors
    /// What the plugin says.
    pub(super) fn of(plugin: &Plugin, description: Word) -> Result<Self, XlaError> {
        let kind = plugin.call(api::DESCRIPTION_KIND, Arguments::new().set(2, description))?;
        // SAFETY: the text lives as long as the description.
        let name = unsafe { text(kind.get(3), kind.get(4)) };
        let found = match plugin.call(api::DESCRIPTION_ATTRIBUTES, Arguments::new().set(2, description)) {
            Err(error) if error.is_unimplemented() => return Ok(Self { name, memory: None }),
            found => found?,
        };
        // SAFETY: there are so many of them, which live as long as the description.
        let attributes = unsafe { attributes(found.get(4), found.get(3)) };
        let memory = attributes.into_iter().find(|(name, _)| name == MEMORY).map(|(_, bytes)| bytes);
        Ok(Self { name, memory })
    }
}
