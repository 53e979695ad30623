//! What a plugin says of a device.

use super::api::{self, Arguments, Plugin, Word, attributes, text};
use crate::error::{EXHAUSTED, XlaError};

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
        let found = plugin.call(api::DESCRIPTION_ATTRIBUTES, Arguments::new().set(2, description))?;
        // SAFETY: there are so many of them, which live as long as the description.
        let attributes = unsafe { attributes(found.get(4), found.get(3)) };
        let memory = attributes.into_iter().find(|(name, _)| name == MEMORY).map(|(_, bytes)| bytes);
        Ok(Self { name, memory })
    }

    /// What a failed call is on such a device: without room it says whose memory is full.
    pub(super) fn full(&self, error: XlaError) -> XlaError {
        match error {
            XlaError::Call { code: EXHAUSTED, message, .. } => {
                XlaError::Memory { device: self.name.clone(), bytes: self.memory, message }
            }
            other => other,
        }
    }
}
