package edge.runtime

import java.io.Closeable
import java.nio.ByteBuffer
import java.nio.ByteOrder
import java.util.concurrent.atomic.AtomicBoolean
import java.util.concurrent.locks.ReentrantLock
import java.util.concurrent.locks.ReentrantReadWriteLock
import kotlin.concurrent.read
import kotlin.concurrent.withLock
import kotlin.concurrent.write
import kotlinx.coroutines.CoroutineScope
import kotlinx.coroutines.CoroutineStart
import kotlinx.coroutines.Dispatchers
import kotlinx.coroutines.Job
import kotlinx.coroutines.awaitCancellation
import kotlinx.coroutines.channels.Channel
import kotlinx.coroutines.flow.Flow
import kotlinx.coroutines.flow.buffer
import kotlinx.coroutines.flow.channelFlow
import kotlinx.coroutines.flow.emitAll
import kotlinx.coroutines.flow.filter
import kotlinx.coroutines.flow.flow
import kotlinx.coroutines.flow.flowOn
import kotlinx.coroutines.flow.map
import kotlinx.coroutines.launch
import kotlinx.coroutines.withContext

private const val PIECE_BYTES = 256
private const val SENSORS_EVERY_NANOS = 500_000_000L

/**
 * A conversation with a model; see [EdgeModel.session].
 *
 * All functions may be called from any thread. Those that compute or read much suspend. [usage], [tokenize], [finish],
 * [cancel] and [trim] never wait, not even while a long prompt runs. [cancel] and [close] may interrupt an answer; functions
 * that change the conversation throw IllegalStateException while one is generated.
 */
public class EdgeSession internal constructor(
    internal val model: EdgeModel,
    private var handle: Long,
    private val sensors: Sensors?,
    mostThreads: Int,
    power: Double?,
) : Closeable {
    private val calls = ReentrantLock() // held by every call into the library but those that never wait
    private val lifetime = ReentrantReadWriteLock() // held for reading by those: `handle` is not freed meanwhile
    private val answering = AtomicBoolean()
    private val pace = sensors?.let { Pace(it) } // used by who holds `calls`
    private val threads = IntArray(mostThreads)
    private var slowed = power != null // by pauses, against which hints would work

    @Volatile private var closing = false

    @Volatile private var cancelled = false // since the answer was asked for

    /** Why the last answer ended; null before the first, while one is generated, and after an error. */
    @Volatile public var finish: Finish? = null
        internal set

    /** Adds a text to the conversation; the next answer does most of the work. */
    public suspend fun append(role: Role, text: String): Unit =
        change { Native.append(it, role.code, text.encodeToByteArray()) }

    public suspend fun append(ids: IntArray): Unit = change { Native.appendIds(it, ids) }

    /**
     * The answer to [prompt] as text, in whole characters.
     *
     * A cold flow: each collector asks again. If the collector is cancelled or stops collecting, the answer ends before
     * its next token. After [cancel] and [close] the flow completes. [finish] then is [Finish.INTERRUPTED]; a question that
     * is cancelled before its first token is taken back.
     */
    public fun answer(prompt: String): Flow<String> = pieces(prompt).map { it.text }.filter { it.isNotEmpty() }

    /** As [answer], with token ids, progress while the prompt runs, and the reason of the end. */
    public fun pieces(prompt: String): Flow<Piece> =
        pieces { Native.append(it, Role.USER.code, prompt.encodeToByteArray()) }

    /** The answer to the appended texts. */
    public fun answer(): Flow<Piece> = pieces { }

    private fun pieces(append: (Long) -> Unit): Flow<Piece> = flow {
        check(answering.compareAndSet(false, true)) { BUSY }
        cancelled = false
        finish = null
        var failed = false
        try {
            emitAll(generated(append))
        } catch (failure: EdgeException) {
            failed = true
            throw failure
        } finally {
            if (finish == null && !failed) finish = Finish.INTERRUPTED // before it was asked
            answering.set(false)
        }
    }

    private fun generated(append: (Long) -> Unit): Flow<Piece> = channelFlow {
        val runs = AtomicBoolean(true)
        val watch = cancelsWith(this, runs)
        var asked = false
        try {
            call(append)
            asked = true
            if (cancelled) cancel() // before it was asked
            val text = ByteArray(PIECE_BYTES)
            val prompt = IntArray(2)
            var read = System.nanoTime() - SENSORS_EVERY_NANOS
            var first = true // with the prompt, whose length is no other's
            do {
                if (sensors != null && System.nanoTime() - read >= SENSORS_EVERY_NANOS) {
                    read = System.nanoTime()
                    show(sensors.read())
                }
                val piece = next(text, prompt, paced = !first)
                first = first && piece.token < 0
                finish = piece.finish.takeIf { it != Finish.GOING }
                send(piece)
            } while (piece.finish == Finish.GOING)
        } catch (closed: ClosedException) {
            finish = Finish.INTERRUPTED
        } finally {
            if (asked && finish == null) drain()
            runs.set(false)
            watch.cancel()
        }
    }.buffer(Channel.RENDEZVOUS).flowOn(Dispatchers.IO)

    /** Cancels what [runs] as soon as [scope] is cancelled, on the thread that does it; never another's answer. */
    private fun cancelsWith(scope: CoroutineScope, runs: AtomicBoolean): Job =
        scope.launch(Dispatchers.Unconfined, CoroutineStart.UNDISPATCHED) {
            try {
                awaitCancellation()
            } finally {
                if (runs.get()) this@EdgeSession.cancel()
            }
        }

    private fun next(text: ByteArray, prompt: IntArray, paced: Boolean = false): Piece {
        val packed = call {
            if (closing) throw ClosedException()
            val begun = System.nanoTime()
            val found = Native.next(it, text, prompt)
            val nanos = System.nanoTime() - begun
            if (paced && !slowed && pace != null) {
                pace.ran(nanos, threads.copyOf(minOf(Native.threads(it, threads), threads.size)))
            }
            found
        }
        return Piece(
            text.decodeToString(0, (packed and 0xffff).toInt()),
            (packed shr 32).toInt(),
            Finish.of((packed shr 16 and 0xffff).toInt()),
            prompt[0],
            prompt[1],
        )
    }

    /** Ends an answer that is not collected to its end, so that the session can continue. */
    private fun drain() {
        val text = ByteArray(PIECE_BYTES)
        try {
            cancel()
            while (finish == null) finish = next(text, IntArray(2)).finish.takeIf { it != Finish.GOING }
        } catch (closed: ClosedException) {
            finish = Finish.INTERRUPTED
        } catch (failed: EdgeException) { // this error ended the answer, and is being thrown
        }
    }

    private fun show(now: Readings) = call { Native.read(it, now.bytes()) }

    /** Ends the answer that is generated, before its next token, also while its prompt runs. Else it does nothing. */
    public fun cancel(): Unit = lifetime.read {
        cancelled = true
        if (handle != 0L && answering.get()) Native.cancel(handle)
    }

    /** Other options, from the next answer on. */
    public fun set(options: EdgeOptions): Unit = changeNow {
        Native.set(it, options.bytes(), options.isaBytes(), options.stopBytes())
        slowed = options.power != null
        if (slowed) pace?.close()
    }

    /**
     * Sets the form of the next and later answers: [text] is a JSON schema or a regular expression. An answer ends where its
     * form does. If the form is refused, answers are free. Throws EdgeException with [Status.UNSUPPORTED], which names what
     * cannot be enforced, [Status.BAD_ARGUMENT] for a text that is malformed.
     */
    public suspend fun constrain(form: Form, text: String = ""): Unit =
        change { Native.constrain(it, form.ordinal, text.encodeToByteArray()) }

    /** Adds to the logits of tokens, in the next and later answers: 100 makes a token all but certain, -100 rules it out. */
    public suspend fun bias(biases: Map<Int, Float>): Unit = change { session ->
        val pairs = ByteBuffer.allocate(8 * biases.size).order(ByteOrder.nativeOrder())
        for ((token, bias) in biases) pairs.putInt(token).putFloat(bias)
        Native.bias(session, pairs.array())
    }

    /**
     * Forgets the last [turns], each a question with its answer. Throws EdgeException with [Status.UNSUPPORTED] where
     * they cannot be taken back: after evictions. Then [reset].
     */
    public fun rewind(turns: Int) {
        require(turns >= 0) { "turns is $turns, but must not be negative" }
        changeNow { Native.rewind(it, turns) }
    }

    /** Forgets the whole conversation. */
    public fun reset(): Unit = changeNow { Native.rewind(it, -1) }

    /** The conversation with its KV rows, for [load] in a session of the same bundle. */
    public suspend fun save(): ByteArray = change { session ->
        ByteArray(Math.toIntExact(Native.save(session, -1, null))).also { Native.save(session, -1, it) }
    }

    /** Writes it to an open file. */
    public suspend fun save(fd: Int): Unit = change { Native.save(it, fd, null) }

    /** Replaces the conversation. If the state is refused, the conversation stays as it was. */
    public suspend fun load(state: ByteArray): Unit = change { Native.load(it, -1, state) }

    /** From an open file. If that is damaged behind its header, the conversation is empty; else as above. */
    public suspend fun load(fd: Int): Unit = change { Native.load(it, fd, null) }

    /**
     * Sets a LoRA adapter made by `edge export-adapter`; null: none. [scale]: factor of its change. Forgets the whole
     * conversation. Throws EdgeException with [Status.BAD_FILE] for adapters of other models, [Status.UNSUPPORTED] if the
     * bundle has no room for adapters ([ModelInfo.loraRank]).
     */
    public suspend fun setAdapter(adapter: ByteArray?, scale: Double = 1.0): Unit =
        change { Native.setAdapter(it, -1, adapter, scale) }

    /** Reads it from a file up to its end, such as an asset's descriptor. */
    public suspend fun setAdapter(fd: Int, scale: Double = 1.0): Unit =
        change { Native.setAdapter(it, fd, null, scale) }

    /**
     * Returns memory to the system; KV rows, with [Trim.HALF] and [Trim.ALL], are lost for good. While an answer is
     * generated, that happens before its next token, without waiting for it. After [close] this does nothing.
     */
    public fun trim(level: Trim): Unit = lifetime.read {
        if (handle != 0L) Native.trim(handle, level.ordinal)
    }

    /** At once: while an answer is generated, figures of before its last step. */
    public fun usage(): Usage = look {
        val usage = struct(Usage.BYTES)
        Native.use(it, usage.array())
        Usage.of(usage)
    }

    /** Token ids of a text, at once. [special]: control tokens are recognized. */
    @JvmOverloads
    public fun tokenize(text: String, special: Boolean = false): IntArray = look {
        val bytes = text.encodeToByteArray()
        val flag = if (special) 1 else 0
        IntArray(Math.toIntExact(Native.tokenize(it, bytes, flag, null))).also { ids ->
            Native.tokenize(it, bytes, flag, ids)
        }
    }

    /** Frees the memory. Cancels a running answer and waits for the end of its step. */
    override fun close() {
        closing = true
        cancel()
        calls.withLock {
            val ended = lifetime.write { handle.also { handle = 0 } }
            if (ended == 0L) return
            pace?.close()
            Native.end(ended)
        }
        model.forget(this)
    }

    /** Calls the library with the session's handle, at once, from any thread. */
    private inline fun <T> look(work: (Long) -> T): T = lifetime.read {
        if (handle == 0L) throw ClosedException()
        work(handle)
    }

    private inline fun <T> call(work: (Long) -> T): T = calls.withLock {
        if (handle == 0L) throw ClosedException()
        work(handle)
    }

    /** Calls the library between answers. */
    private inline fun <T> changeNow(runs: AtomicBoolean? = null, work: (Long) -> T): T {
        check(answering.compareAndSet(false, true)) { BUSY }
        runs?.set(true)
        try {
            return call(work)
        } finally {
            runs?.set(false)
            answering.set(false)
        }
    }

    /** As [changeNow], on a thread that may block. Cancelling the coroutine cancels what runs, and waits for it. */
    internal suspend fun <T> change(work: (Long) -> T): T = withContext(Dispatchers.IO) {
        val runs = AtomicBoolean()
        val watch = cancelsWith(this, runs)
        try {
            changeNow(runs, work)
        } finally {
            watch.cancel()
        }
    }
}

private const val BUSY = "the session is busy with an answer: cancel it or wait for its end"

private class ClosedException : IllegalStateException("the session is closed")
