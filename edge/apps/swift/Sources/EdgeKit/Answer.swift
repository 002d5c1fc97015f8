/// The pieces of an answer, which is generated while they are read; see `EdgeSession.pieces(of:)`. Each loop asks
/// again.
public struct Pieces: AsyncSequence, Sendable {
    public typealias Element = Piece

    let session: EdgeSession
    let prompt: String?  // nil: what was appended

    public func makeAsyncIterator() -> AsyncIterator {
        AsyncIterator(reader: Reader(session, prompt))
    }

    public struct AsyncIterator: AsyncIteratorProtocol {
        let reader: Reader

        public mutating func next() async throws -> Piece? {
            try await reader.next()
        }
    }

    /// Ends the answer when its iterator is gone.
    final class Reader: @unchecked Sendable {  // of one task at a time, as iterators are
        private let session: EdgeSession
        private let prompt: String?
        private var number: Int?
        private var ended = false

        init(_ session: EdgeSession, _ prompt: String?) {
            self.session = session
            self.prompt = prompt
        }

        deinit {
            if let number { session.abandon(number) }
        }

        func next() async throws -> Piece? {
            if ended { return nil }
            if number == nil, Task.isCancelled {
                ended = true
                session.neverBegun()
                return nil
            }
            let number = try await begun()
            if Task.isCancelled { session.cancel() }
            guard let piece = try await session.next(of: number) else {
                ended = true
                return nil
            }
            ended = piece.finish != .going
            return piece
        }

        private func begun() async throws -> Int {
            if let number { return number }
            let made = try await session.begin(prompt)
            number = made
            return made
        }
    }
}

/// An answer as text, in whole characters; see `EdgeSession.answer(to:)`.
public struct Answer: AsyncSequence, Sendable {
    public typealias Element = String

    let pieces: Pieces

    public func makeAsyncIterator() -> AsyncIterator {
        AsyncIterator(pieces: pieces.makeAsyncIterator())
    }

    public struct AsyncIterator: AsyncIteratorProtocol {
        var pieces: Pieces.AsyncIterator

        public mutating func next() async throws -> String? {
            while let piece = try await pieces.next() {
                if !piece.text.isEmpty { return piece.text }
            }
            return nil
        }
    }
}
