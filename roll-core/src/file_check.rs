//! The check of a component's files before a run: it reads headers but no weights, writes nothing, and reports lines
//! for people.

use crate::{BuildContext, Kind, Options, Result};

/// How a component lists its files. Submit with `inventory::submit!`, next to the [`crate::Registration`] of the same
/// kind and name.
pub struct FileCheck {
    /// The kind of the component.
    pub kind: Kind,
    /// Its name.
    pub name: &'static str,
    /// Fails if a file is missing and would not be downloaded. The contents of the files are checked when the component
    /// is opened with [`BuildContext::headers_only`].
    pub check: fn(&Options, &BuildContext) -> Result<FilesFound>,
}

/// The files that were found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FilesFound {
    /// A line for each part, for people: "VAE: 1 file, 0.51 GB, 194 tensors".
    pub lines: Vec<String>,
    /// Files that a run would download first; their contents are unknown.
    pub missing: Option<String>,
}

inventory::collect!(FileCheck);

impl FileCheck {
    /// The file check of the linked component of this kind and name.
    pub fn of(kind: Kind, name: &str) -> Option<&'static Self> {
        inventory::iter::<Self>.into_iter().find(|check| check.kind == kind && check.name == name)
    }
}
