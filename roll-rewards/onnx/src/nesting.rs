//! Refuses files with deeply nested messages before a recursive parser reads them.
//!
//! A graph may contain an attribute that contains a graph, and a type may contain types. Each level costs a file a
//! dozen bytes and the parser a stack frame, and a stack overflow cannot be caught.

/// Deepest nesting that is parsed. Real files are below 30.
const MAX_DEPTH: usize = 64;

/// The messages of onnx.proto that can contain themselves, directly or indirectly.
#[derive(Clone, Copy)]
enum Message {
    Model,
    Training,
    Function,
    Graph,
    Node,
    Attribute,
    ValueInfo,
    Type,
    Holder,
    Map,
}

impl Message {
    /// The message in field `number`, if it is one of these messages.
    fn field(self, number: u64) -> Option<Self> {
        Some(match (self, number) {
            (Self::Model, 7) => Self::Graph,
            (Self::Model, 20) => Self::Training,
            (Self::Model, 25) => Self::Function,
            (Self::Training, 1 | 2) => Self::Graph,
            (Self::Function, 7) => Self::Node,
            (Self::Function, 11) => Self::Attribute,
            (Self::Function, 12) => Self::ValueInfo,
            (Self::Graph, 1) => Self::Node,
            (Self::Graph, 11..=13) => Self::ValueInfo,
            (Self::Node, 5) => Self::Attribute,
            (Self::Attribute, 6 | 11) => Self::Graph,
            (Self::Attribute, 14 | 15) => Self::Type,
            (Self::ValueInfo, 2) => Self::Type,
            // Sequence and optional types.
            (Self::Type, 4 | 9) => Self::Holder,
            (Self::Holder, 1) => Self::Type,
            (Self::Type, 5) => Self::Map,
            (Self::Map, 2) => Self::Type,
            _ => return None,
        })
    }

    /// Whether the field may have the wire type `wire`. The parser reads some fields by their defined type and ignores
    /// the file's wire type; without this check, a file could present one tree here and another to the parser.
    fn allows(self, number: u64, wire: u64) -> bool {
        match (self, number) {
            (Self::Attribute, 7 | 8) => true,
            (Self::Model, 1 | 5) | (Self::Attribute, 3 | 20) | (Self::Map, 1) | (Self::Function, 2 | 3) => wire == 0,
            (Self::Attribute, 2) => wire == 5,
            (_, ..=25) => wire == 2,
            _ => true,
        }
    }
}

/// Fails if the model in `bytes` is nested too deeply. Malformed bytes pass, because the parser refuses them.
pub(super) fn check(bytes: &[u8]) -> Result<(), String> {
    let mut open = vec![(Message::Model, bytes)];
    let mut depths = vec![0];
    while let (Some((message, rest)), Some(depth)) = (open.pop(), depths.pop()) {
        if depth > MAX_DEPTH {
            return Err(format!("its graphs or types nest deeper than {MAX_DEPTH} levels"));
        }
        let mut rest = rest;
        while let Some((tag, field, after)) = next_field(rest) {
            rest = after;
            let (number, wire) = (tag >> 3, tag & 7);
            if !message.allows(number, wire) {
                return Err(format!("it is no ONNX model: its field {number} has the wire type {wire}"));
            }
            if let (Some(inner), Some(field)) = (message.field(number), field) {
                open.push((inner, field));
                depths.push(depth + 1);
            }
        }
    }
    Ok(())
}

/// The tag of the first field, its bytes if it is length-delimited, and the rest.
fn next_field(bytes: &[u8]) -> Option<(u64, Option<&[u8]>, &[u8])> {
    let (tag, rest) = varint(bytes)?;
    match tag & 7 {
        0 => Some((tag, None, varint(rest)?.1)),
        1 => Some((tag, None, rest.get(8..)?)),
        2 => {
            let (length, rest) = varint(rest)?;
            let (field, rest) = rest.split_at_checked(usize::try_from(length).ok()?)?;
            Some((tag, Some(field), rest))
        }
        5 => Some((tag, None, rest.get(4..)?)),
        _ => None,
    }
}

fn varint(bytes: &[u8]) -> Option<(u64, &[u8])> {
    let mut value = 0u64;
    for (i, &byte) in bytes.iter().enumerate().take(10) {
        value |= u64::from(byte & 0x7f).checked_shl(7 * i as u32).unwrap_or(0);
        if byte & 0x80 == 0 {
            return Some((value, &bytes[i + 1..]));
        }
    }
    None
}
