package edge.runtime

import kotlinx.coroutines.flow.Flow
import kotlinx.coroutines.flow.FlowCollector
import kotlinx.coroutines.flow.flow
import kotlinx.coroutines.flow.takeWhile

/**
 * What is said in a sound of 16-bit samples, mono, which come piece by piece: the segments, as they are found. [ears]: the
 * path of the bundle's ears.edge, which the first call of a session opens. Cancelling the collector ends it, as
 * [EdgeSession.cancel] does, and [EdgeSession.finish] says why it ended. Throws EdgeException with [Status.UNSUPPORTED] if
 * the bundle hears nothing.
 */
public fun EdgeSession.transcribe(samples: Flow<ShortArray>, hearing: Hearing, ears: String): Flow<Segment> {
    val path = pathBytes(ears)
    return transcribe(samples) { hearing.listen(it, path, -1, 0, 0) }
}

/**
 * With ears.edge as a part of an open file that begins at a multiple of 64 bytes; it may be closed after the first
 * segment. In assets, see `assetPath`.
 */
public fun EdgeSession.transcribe(
    samples: Flow<ShortArray>,
    hearing: Hearing,
    fd: Int,
    offset: Long = 0,
    length: Long = 0,
): Flow<Segment> = transcribe(samples) { hearing.listen(it, null, fd, offset, length) }

private fun Hearing.listen(session: Long, ears: ByteArray?, fd: Int, offset: Long, length: Long) = Native.listen(
    session,
    ears,
    fd,
    offset,
    length,
    bytes(),
    language?.encodeToByteArray(),
    prompt?.encodeToByteArray(),
)

private fun EdgeSession.transcribe(samples: Flow<ShortArray>, listen: (Long) -> Unit): Flow<Segment> = flow {
    change(listen)
    finish = null
    try {
        samples.takeWhile { finish == null }.collect { part ->
            var taken = 0
            while (taken < part.size && finish == null) taken += hear(this, part, taken)
        }
        while (finish == null) hear(this, ShortArray(0), 0)
    } finally {
        if (finish == null) finish = Finish.INTERRUPTED
    }
}

/** Hears samples up to the next segment, which goes to [found]; returns their number. */
private suspend fun EdgeSession.hear(found: FlowCollector<Segment>, part: ShortArray, from: Int): Int {
    val bytes = struct(Segment.BYTES)
    var segment: Segment? = null
    val heard = change { session ->
        Native.hear(session, part, from, bytes.array()).also { segment = Segment.of(bytes) }
    }
    segment?.takeIf { it.text.isNotEmpty() }?.let { found.emit(it) }
    (heard ushr 32).toInt().takeIf { it != 0 }?.let { finish = Finish.of(it) }
    return heard.toInt()
}
