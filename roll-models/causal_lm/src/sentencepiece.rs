//! Conversion of SentencePiece BPE vocabularies to a `tokenizer.json`.
//!
//! A SentencePiece vocabulary has pieces with scores and no list of merges: of all neighbours whose concatenation is a
//! piece, those with the highest score are merged first. The equivalent merges are all splits of each piece into two
//! pieces, in the order of the scores.

use std::cmp::Reverse;
use std::collections::HashMap;

use serde_json::{Value as Json, json};

/// The character for a blank within pieces.
const BLANK: &str = "\u{2581}";
/// Maximal size of a piece in bytes, because every position is tried as a split. A file with a longer piece is wrong or
/// hostile.
const MAX_PIECE: usize = 1 << 12;

// Types of pieces; see [`Piece::kind`].
pub(super) const NORMAL: i64 = 1;
const UNKNOWN: i64 = 2;
pub(super) const CONTROL: i64 = 3;
pub(super) const ADDED: i64 = 4;
const BYTE: i64 = 6;

/// A piece of the vocabulary. Its index is its id.
#[derive(Clone, Copy, Debug)]
pub struct Piece<'a> {
    pub text: &'a str,
    /// Pieces with higher scores are merged first.
    pub score: f64,
    /// 1: a normal token, 2: the unknown token, 3: a control token, 4: a user-defined token, 6: a byte, written
    /// `<0x0A>`.
    pub kind: i64,
}

/// Returns the contents of a `tokenizer.json`. `unknown` is the id of the unknown token. With `begins_with_space`, a
/// blank is added before each text. With `absorbs_blanks`, control tokens absorb the blanks after them, except tokens
/// that begin or end a document.
pub fn tokenizer(
    pieces: &[Piece<'_>],
    unknown: Option<usize>,
    begins_with_space: bool,
    absorbs_blanks: bool,
) -> Result<Json, String> {
    if let Some(long) = pieces.iter().find(|piece| piece.text.len() > MAX_PIECE) {
        return Err(format!("a token of {} bytes; expected at most {MAX_PIECE}", long.text.len()));
    }
    let unknown_id = unknown.or_else(|| pieces.iter().position(|piece| piece.kind == UNKNOWN));
    let unknown_text = unknown_id.and_then(|id| pieces.get(id)).map(|piece| piece.text);
    let vocab: serde_json::Map<String, Json> =
        pieces.iter().enumerate().map(|(id, piece)| (piece.text.to_string(), json!(id))).collect();
    let mut added: Vec<Json> = Vec::new();
    for (id, piece) in pieces.iter().enumerate().filter(|(_, piece)| matches!(piece.kind, CONTROL | ADDED)) {
        let is_end_of_document = matches!(piece.text, "<s>" | "<|endoftext|>");
        let token = AddedToken {
            id,
            text: piece.text,
            is_special: piece.kind == CONTROL,
            absorbs_blanks: absorbs_blanks && !is_end_of_document,
        };
        added.push(token.to_json());
    }
    let replace = |from: &str, to: &str| json!({ "type": "Replace", "pattern": { "String": from }, "content": to });
    let mut normalizers = vec![replace(" ", BLANK)];
    let mut decoders = vec![replace(BLANK, " "), json!({ "type": "ByteFallback" }), json!({ "type": "Fuse" })];
    if begins_with_space {
        normalizers.insert(0, json!({ "type": "Prepend", "prepend": BLANK }));
        decoders.push(json!({ "type": "Strip", "content": " ", "start": 1, "stop": 0 }));
    }
    Ok(json!({
        "version": "1.0",
        "added_tokens": added,
        "normalizer": { "type": "Sequence", "normalizers": normalizers },
        "pre_tokenizer": null,
        "decoder": { "type": "Sequence", "decoders": decoders },
        "model": {
            "type": "BPE", "unk_token": unknown_text, "fuse_unk": true, "byte_fallback": true,
            "vocab": vocab, "merges": merges(pieces),
        },
    }))
}

/// A token that is recognised in the text before all others.
pub struct AddedToken<'a> {
    pub id: usize,
    pub text: &'a str,
    /// Whether decoding can leave the token out.
    pub is_special: bool,
    /// Whether the token absorbs the blanks after it.
    pub absorbs_blanks: bool,
}

impl AddedToken<'_> {
    /// Returns the entry of `added_tokens`.
    pub fn to_json(&self) -> Json {
        json!({
            "id": self.id, "content": self.text, "special": self.is_special, "single_word": false, "lstrip": false,
            "rstrip": self.absorbs_blanks, "normalized": false,
        })
    }
}

/// Returns the pairs of pieces whose concatenation is a piece, in the order of merging: by descending score of the
/// concatenation, then by descending lengths of the two pieces, then by their ids.
fn merges<'a>(pieces: &[Piece<'a>]) -> Vec<[&'a str; 2]> {
    let ids: HashMap<&str, usize> = pieces.iter().enumerate().map(|(id, piece)| (piece.text, id)).collect();
    // Pairs with the score of their concatenation.
    let mut found = Vec::new();
    for piece in pieces.iter().filter(|piece| !matches!(piece.kind, UNKNOWN | CONTROL | BYTE)) {
        let splits = piece.text.char_indices().skip(1).map(|(at, _)| piece.text.split_at(at));
        let mut pairs: Vec<_> = splits.filter_map(|(a, b)| Some((ids.get(a)?, ids.get(b)?, [a, b]))).collect();
        pairs.sort_by_key(|(a, b, _)| (**a, **b));
        found.extend(pairs.into_iter().map(|(.., pair)| (piece.score, pair)));
    }
    let length = |text: &str| Reverse(text.chars().count());
    found.sort_by(|(score, [a, b]), (other_score, [c, d])| {
        other_score.total_cmp(score).then_with(|| (length(a), length(b)).cmp(&(length(c), length(d))))
    });
    found.into_iter().map(|(_, pair)| pair).collect()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::Tokenizer;

    fn pieces() -> Vec<Piece<'static>> {
        let mut pieces = vec![
            Piece { text: "<unk>", score: 0.0, kind: UNKNOWN },
            Piece { text: "<s>", score: 0.0, kind: CONTROL },
            Piece { text: "<end>", score: 0.0, kind: CONTROL },
        ];
        pieces.extend(["<0x0A>", "<0xC3>", "<0xA9>"].map(|text| Piece { text, score: 0.0, kind: BYTE }));
        // SentencePiece orders pieces by their scores: the highest first, characters last.
        let learnt = ["he", "ll", "\u{2581}he", "hell", "llo", "\u{2581}", "h", "e", "l", "o"];
        pieces.extend(learnt.iter().enumerate().map(|(i, text)| Piece { text, score: -(i as f64), kind: 1 }));
        pieces
    }

    fn tokens(tokenizer: &Tokenizer, text: &str) -> Vec<String> {
        tokenizer.encode(text).unwrap().into_iter().map(|id| tokenizer.token(id).unwrap()).collect()
    }

    #[test]
    fn merges_neighbours_with_the_highest_score_first() {
        let json = tokenizer(&pieces(), None, false, false).unwrap();
        let tokenizer = Tokenizer::parse(json.to_string().as_bytes()).unwrap();
        assert_eq!(tokens(&tokenizer, "hello"), ["hell", "o"]);
        assert_eq!(tokens(&tokenizer, "llo hell<end>"), ["llo", "\u{2581}he", "ll", "<end>"]);
        // Characters without a piece fall back to bytes, and those without bytes to the unknown token.
        assert_eq!(tokens(&tokenizer, "\n\u{e9}z"), ["<0x0A>", "<0xC3>", "<0xA9>", "<unk>"]);
        let ids = tokenizer.encode("he \u{e9} o").unwrap();
        assert_eq!(tokenizer.decode(&ids).unwrap(), "he \u{e9} o");
    }

    #[test]
    fn leading_blank_is_added_and_removed() {
        let json = tokenizer(&pieces(), None, true, true).unwrap();
        let tokenizer = Tokenizer::parse(json.to_string().as_bytes()).unwrap();
        assert_eq!(tokens(&tokenizer, "hell"), ["\u{2581}he", "ll"]);
        assert_eq!(tokenizer.decode(&tokenizer.encode("hell").unwrap()).unwrap(), "hell");
        assert_eq!(tokens(&tokenizer, "<end> hell"), ["<end>", "\u{2581}he", "ll"], "the blank belongs to the token");
    }

    #[test]
    fn merges_are_all_splits_into_two_pieces() {
        let found = merges(&pieces());
        assert_eq!(found[..3], [["h", "e"], ["l", "l"], ["\u{2581}", "he"]]);
        assert!(found.contains(&["he", "ll"]) && found.contains(&["ll", "o"]));
        assert_eq!(found.len(), 5);
    }
}
