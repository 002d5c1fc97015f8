package edge.runtime

import java.io.ByteArrayOutputStream
import java.io.Closeable
import java.nio.ByteBuffer
import java.nio.ByteOrder
import java.util.concurrent.atomic.AtomicBoolean
import java.util.concurrent.locks.ReentrantLock
import kotlin.concurrent.withLock
import kotlinx.coroutines.CoroutineStart
import kotlinx.coroutines.Dispatchers
import kotlinx.coroutines.awaitCancellation
import kotlinx.coroutines.channels.Channel
import kotlinx.coroutines.flow.Flow
import kotlinx.coroutines.flow.buffer
import kotlinx.coroutines.flow.channelFlow
import kotlinx.coroutines.flow.filter
import kotlinx.coroutines.flow.flowOn
import kotlinx.coroutines.flow.map
import kotlinx.coroutines.launch

private const val PIECE_BYTES = 256
private const val SENSORS_EVERY_NANOS = 500_000_000L

/**
 * A conversation with a model; see [EdgeModel.session].
 *
 * All functions may be called from any thread. [cancel] and [close] may interrupt an answer, and [trim] comes between its tokens; other functions that
 * change the conversation throw IllegalStateException while one is generated.
 */
class EdgeSession internal constructor(
    private val model: EdgeModel, private var handle: Long, private val sensors: Sensors?, mostThreads: Int, power: Double?,
) : Closeable {
    private val calls = ReentrantLock()         // held by every call into the library but cancel and trim
    private val lifetime = Any()                // guards `handle` from being freed during these; never held for long
    private val answering = AtomicBoolean()
    private val pace = sensors?.let { Pace(it) } // used by who holds `calls`
    private val threads = IntArray(mostThreads)
    private var slowed = power != null          // by pauses, against which hints would work
    @Volatile private var closing = false

    /** Why the last answer ended; null before the first, while one is generated, and after an error. */
    @Volatile var finish: Finish? = null
        private set

    /** Adds a text to the conversation; the next answer does most of the work. */
    fun append(role: Role, text: String) = change { Native.append(it, role.ordinal, text.encodeToByteArray()) }

    fun append(ids: IntArray) = change { Native.appendIds(it, ids) }

    /**
     * The answer to [prompt] as text, in whole characters.
     *
     * A cold flow: each collector asks again. If the collector is cancelled or stops collecting, the answer ends before
     * its next token. After [cancel] and [close] the flow completes; [finish] then is [Finish.INTERRUPTED].
     */
    fun answer(prompt: String): Flow<String> =
        pieces { Native.append(it, Role.USER.ordinal, prompt.encodeToByteArray()) }
            .map { it.text }.filter { it.isNotEmpty() }

    /** The answer to the appended texts, with token ids and the reason of its end. */
    fun answer(): Flow<Piece> = pieces { }

    private fun pieces(append: (Long) -> Unit): Flow<Piece> = channelFlow {
        check(answering.compareAndSet(false, true)) { BUSY }
        finish = null
        // Cancelling the collector cancels this coroutine at once, on the thread that cancels.
        val watch = launch(Dispatchers.Unconfined, CoroutineStart.UNDISPATCHED) {
            try {
                awaitCancellation()
            } finally {
                if (answering.get()) this@EdgeSession.cancel()
            }
        }
        var asked = false
        try {
            call(append)
            asked = true
            val text = ByteArray(PIECE_BYTES)
            var read = System.nanoTime() - SENSORS_EVERY_NANOS
            var first = true // with the prompt, whose length is no other's
            do {
                if (sensors != null && System.nanoTime() - read >= SENSORS_EVERY_NANOS) {
                    read = System.nanoTime()
                    show(sensors.read())
                }
                val piece = next(text, paced = !first)
                first = false
                finish = piece.finish.takeIf { it != Finish.GOING }
                send(piece)
            } while (piece.finish == Finish.GOING)
        } catch (closed: ClosedException) {
            finish = Finish.INTERRUPTED
        } finally {
            if (asked && finish == null) drain()
            answering.set(false)
            watch.cancel()
        }
    }.buffer(Channel.RENDEZVOUS).flowOn(Dispatchers.IO)

    private fun next(text: ByteArray, paced: Boolean = false): Piece {
        val packed = call {
            if (closing) throw ClosedException()
            val begun = System.nanoTime()
            val found = Native.next(it, text)
            val nanos = System.nanoTime() - begun
            if (paced && !slowed && pace != null)
                pace.ran(nanos, threads.copyOf(minOf(Native.threads(it, threads), threads.size)))
            found
        }
        return Piece(
            text.decodeToString(0, (packed and 0xffff).toInt()), (packed shr 32).toInt(),
            Finish.of((packed shr 16 and 0xffff).toInt()),
        )
    }

    /** Ends an answer that is not collected to its end, so that the session can continue. */
    private fun drain() {
        val text = ByteArray(PIECE_BYTES)
        try {
            cancel()
            while (finish == null) finish = next(text).finish.takeIf { it != Finish.GOING }
        } catch (closed: ClosedException) {
            finish = Finish.INTERRUPTED
        } catch (failed: EdgeException) { // this error ended the answer, and is being thrown
        }
    }

    private fun show(now: Readings) = call { Native.read(it, now.bytes()) }

    /** Ends the answer that is generated, before its next token, also while its prompt runs. Else it does nothing. */
    fun cancel() = synchronized(lifetime) {
        if (handle != 0L && answering.get()) Native.cancel(handle)
    }

    /** Other options, from the next answer on. */
    fun set(options: EdgeOptions) = change {
        Native.set(it, options.bytes(), options.isaBytes(), options.stopBytes())
        slowed = options.power != null
        if (slowed) pace?.close()
    }

    /**
     * Sets the form of the next and later answers: [text] is a JSON schema or a regular expression. An answer ends where its
     * form does. If the form is refused, answers are free. Throws EdgeException with [Status.UNSUPPORTED], which names what
     * cannot be enforced, [Status.BAD_ARGUMENT] for a text that is malformed.
     */
    @JvmOverloads
    fun constrain(form: Form, text: String = "") = change { Native.constrain(it, form.ordinal, text.encodeToByteArray()) }

    /**
     * Forgets the last [turns], each a question with its answer. Throws EdgeException with [Status.UNSUPPORTED] where
     * they cannot be taken back: after evictions. Then [reset].
     */
    fun rewind(turns: Int) {
        require(turns >= 0) { "turns is $turns, but must not be negative" }
        change { Native.rewind(it, turns) }
    }

    /** Forgets the whole conversation. */
    fun reset() = change { Native.rewind(it, -1) }

    /** The conversation with its KV rows, for [load] in a session of the same bundle. */
    fun save(): ByteArray = change { session ->
        ByteArray(Math.toIntExact(Native.save(session, -1, null))).also { Native.save(session, -1, it) }
    }

    fun save(fd: Int) = change { Native.save(it, fd, null) }

    fun load(state: ByteArray) = change { Native.load(it, -1, state) }

    fun load(fd: Int) = change { Native.load(it, fd, null) }

    /**
     * Sets a LoRA adapter made by `edge export-adapter`; null: none. [scale]: factor of its change. Forgets the whole
     * conversation. Throws EdgeException with [Status.BAD_FILE] for adapters of other models, [Status.UNSUPPORTED] if the
     * bundle has no room for adapters ([ModelInfo.loraRank]).
     */
    @JvmOverloads
    fun setAdapter(adapter: ByteArray?, scale: Double = 1.0) = change { Native.setAdapter(it, -1, adapter, scale) }

    /** Reads it from a file up to its end, such as an asset's descriptor. */
    @JvmOverloads
    fun setAdapter(fd: Int, scale: Double = 1.0) = change { Native.setAdapter(it, fd, null, scale) }

    /**
     * Returns memory to the system; KV rows, with [Trim.HALF] and [Trim.ALL], are lost for good. While an answer is
     * generated, that happens before its next token, without waiting for it. After [close] this does nothing.
     */
    fun trim(level: Trim) = synchronized(lifetime) {
        if (handle != 0L) Native.trim(handle, level.ordinal)
    }

    fun usage(): Usage = call {
        val usage = struct(Usage.BYTES)
        Native.use(it, usage.array())
        Usage.of(usage)
    }

    /** Token ids of a text. [special]: control tokens are recognized. */
    @JvmOverloads
    fun tokenize(text: String, special: Boolean = false): IntArray = call {
        val bytes = text.encodeToByteArray()
        val flag = if (special) 1 else 0
        IntArray(Math.toIntExact(Native.tokenize(it, bytes, flag, null))).also { ids ->
            Native.tokenize(it, bytes, flag, ids)
        }
    }

    /**
     * The embedding of a text, of [ModelInfo.dimensions] values; the first [dimensions] if that is not 0. [prompt]: the
     * name of one of the model's, such as query or document, to stand before the text. [normalize]: scale to length 1.
     * [truncate]: leave out the end of a text that is longer than the cache. Forgets the conversation. Throws EdgeException
     * with [Status.UNSUPPORTED] if the bundle makes no embeddings, [Status.FULL] for a text that is too long.
     */
    @JvmOverloads
    fun embed(
        text: String, prompt: String? = null, dimensions: Int = 0, normalize: Boolean = true, truncate: Boolean = false,
    ): FloatArray = embed(listOf(text), prompt, dimensions, normalize, truncate)[0]

    /** Of several texts, which takes less time than one after the other. */
    @JvmOverloads
    fun embed(
        texts: List<String>, prompt: String? = null, dimensions: Int = 0, normalize: Boolean = true,
        truncate: Boolean = false,
    ): List<FloatArray> = change { session ->
        require(dimensions >= 0) { "dimensions is $dimensions, but must not be negative" }
        require(prompt == null || '\u0000' !in prompt) { "the prompt's name contains the character U+0000" }
        val bytes = texts.map { it.encodeToByteArray() }
        val size = if (dimensions > 0) dimensions else model.info.dimensions
        val vectors = ByteBuffer.allocate(Math.multiplyExact(4 * texts.size, size)).order(ByteOrder.nativeOrder())
        Native.embed(
            session, ByteArrayOutputStream().apply { bytes.forEach { write(it, 0, it.size) } }.toByteArray(),
            IntArray(bytes.size) { bytes[it].size }, prompt?.encodeToByteArray(), dimensions, if (normalize) 0 else 1,
            if (truncate) 1 else 0, vectors.array(),
        )
        texts.map { FloatArray(size) { vectors.float } }
    }

    /**
     * What is said in a sound of 16-bit samples, mono, which come piece by piece: the segments, as they are found. [ears]: the
     * path of the bundle's ears.edge, which the first call of a session opens. Collecting blocks; [cancel] ends it, and
     * [finish] says why it ended. Throws EdgeException with [Status.UNSUPPORTED] if the bundle hears nothing.
     */
    fun transcribe(samples: Iterator<ShortArray>, hearing: Hearing, ears: String): Sequence<Segment> {
        require('\u0000' !in ears) { "the path contains the character U+0000" }
        return transcribe(samples, hearing) { Native.listen(
            it, ears.encodeToByteArray() + 0, -1, 0, 0, hearing.bytes(), hearing.language?.encodeToByteArray(),
            hearing.prompt?.encodeToByteArray(),
        ) }
    }

    /** With ears.edge as a part of an open file, such as an asset; it may be closed after the first segment. */
    fun transcribe(
        samples: Iterator<ShortArray>, hearing: Hearing, fd: Int, offset: Long = 0, length: Long = 0,
    ): Sequence<Segment> = transcribe(samples, hearing) { Native.listen(
        it, null, fd, offset, length, hearing.bytes(), hearing.language?.encodeToByteArray(),
        hearing.prompt?.encodeToByteArray(),
    ) }

    private fun transcribe(
        samples: Iterator<ShortArray>, hearing: Hearing, listen: (Long) -> Unit,
    ): Sequence<Segment> = sequence {
        change(listen)
        finish = null
        var part = ShortArray(0)
        var taken = 0
        var ended = false
        while (true) {
            while (taken == part.size && !ended) {
                ended = !samples.hasNext()
                part = if (ended) ShortArray(0) else samples.next()
                taken = 0
            }
            val bytes = struct(Segment.BYTES)
            var found: Segment? = null
            val heard = change { session ->
                Native.hear(session, part, taken, bytes.array()).also { found = Segment.of(bytes) }
            }
            taken += heard.toInt()
            found?.takeIf { it.text.isNotEmpty() }?.let { yield(it) }
            (heard ushr 32).toInt().takeIf { it != 0 }?.let {
                finish = Finish.of(it)
                return@sequence
            }
        }
    }

    /** Frees the memory. Cancels a running answer and waits for its end. */
    override fun close() {
        closing = true
        cancel()
        calls.withLock {
            val ended = synchronized(lifetime) { handle.also { handle = 0 } }
            if (ended == 0L) return
            pace?.close()
            Native.end(ended)
        }
        model.forget(this)
    }

    private inline fun <T> call(work: (Long) -> T): T = calls.withLock {
        if (handle == 0L) throw ClosedException()
        work(handle)
    }

    private inline fun <T> change(work: (Long) -> T): T {
        check(answering.compareAndSet(false, true)) { BUSY }
        try {
            return call(work)
        } finally {
            answering.set(false)
        }
    }
}

private const val BUSY = "the session is busy with an answer: cancel it or wait for its end"

private class ClosedException : IllegalStateException("the session is closed")
