/* Conversations with an exported bundle. Prints a line for each answer: token ids, why it ended, text. */
package edge.runtime

import java.io.File
import java.io.RandomAccessFile
import java.util.concurrent.atomic.AtomicInteger
import kotlin.concurrent.thread
import kotlinx.coroutines.Dispatchers
import kotlinx.coroutines.async
import kotlinx.coroutines.cancel
import kotlinx.coroutines.flow.collect
import kotlinx.coroutines.flow.take
import kotlinx.coroutines.flow.toList
import kotlinx.coroutines.launch
import kotlinx.coroutines.runBlocking

private val GREEDY = EdgeOptions(temperature = 0.0, maxTokens = 6, ignoreEos = true)

private suspend fun show(name: String, session: EdgeSession, question: String? = null) {
    if (question != null) session.append(Role.USER, question)
    val pieces = session.answer().toList()
    val tokens = pieces.map { it.token }.filter { it >= 0 }
    val text = pieces.joinToString("") { it.text }.encodeToByteArray()
    println("$name=$tokens ${pieces.last().finish} ${text.joinToString("") { "%02x".format(it) }}")
}

private fun conversation(model: EdgeModel, folder: File) = runBlocking {
    val session = model.session(GREEDY)
    show("first", session, "Hi")
    session.set(
        EdgeOptions(
            temperature = 3.0, topK = 50, topP = 0.95, minP = 0.001, repeatPenalty = 1.3, seed = 4, maxTokens = 6,
            ignoreEos = true,
        ),
    )
    val state = session.save()
    show("second", session, "And?")
    session.load(state)
    session.trim(Trim.SOFT)
    show("second", session, "And?")
    session.set(GREEDY)
    RandomAccessFile(folder.resolve("state"), "rw").use { file -> session.save(descriptor(file)) }
    val other = model.session(GREEDY)
    RandomAccessFile(folder.resolve("state"), "r").use { file -> other.load(descriptor(file)) }
    show("third", session, "Go on")
    show("third", other, "Go on")
    session.rewind(3)
    show("first", session, "Hi")
    session.reset()
    session.append(Role.SYSTEM, "Be brief.")
    show("system", session, "Hi")
    println("ids=${session.tokenize("The 😀 fox").toList()}")
    println("rows=${session.usage().rows} ${session.usage().capacity}")
}

/* The number that Android's ParcelFileDescriptor.getFd gives; the desktop's JVM keeps it in a private field. */
internal fun descriptor(file: RandomAccessFile): Int =
    file.fd.javaClass.getDeclaredField("fd").apply { isAccessible = true }.getInt(file.fd)

private fun interruptions(model: EdgeModel) = runBlocking {
    val session = model.session(EdgeOptions(temperature = 0.0, ignoreEos = true)) // without an end
    session.answer("Hi").take(2).collect()
    println("taken=${session.finish}")
    session.reset()
    session.set(GREEDY)
    show("first", session, "Hi")
    session.set(EdgeOptions(temperature = 0.0, ignoreEos = true))
    val endless = async(Dispatchers.Default) { session.answer("Hi").toList() }
    while (session.usage().tokens < 200) Thread.sleep(1)
    session.close()
    println("closed=${endless.await().isNotEmpty()} ${session.finish}")
}

/* Usage and tokens while a long prompt runs, and what is left of it when it is cancelled. */
private fun prompts(model: EdgeModel) = runBlocking {
    val session = model.session(GREEDY)
    show("first", session, "Hi")
    val rows = session.usage().rows
    val told = mutableListOf<Int>()
    val job = launch(Dispatchers.Default) {
        session.pieces("word ".repeat(9)).collect { piece ->
            told += piece.done
            if (piece.done < piece.asked) {
                check(session.tokenize("The").isNotEmpty() && session.usage().tokens > 0)
                this@launch.cancel()
            }
        }
    }
    job.join()
    println("prompt=$told ${job.isCancelled} ${session.finish} ${session.usage().rows == rows}")
    launch {
        this@launch.cancel() // before the answer has a thread that asks
        session.answer("never asked").collect()
    }.join()
    println("never=${session.finish} ${session.usage().rows == rows}")
    session.append(Role.USER, "unanswered")
    show("again", session, "And?")
    session.close()
}

/* Threads that answer, cancel, trim, save and close; the runtime says BUSY if two come at once. */
private fun storm(model: EdgeModel) {
    val busy = AtomicInteger()
    val answered = AtomicInteger()
    repeat(3) { round ->
        val session = model.session(GREEDY)
        val threads = List(4) { i ->
            thread {
                val random = kotlin.random.Random(4 * round + i)
                repeat(15) {
                    try {
                        when (random.nextInt(6)) {
                            0, 1 -> runBlocking { session.answer("Hi").take(1 + random.nextInt(8)).collect() }
                            2 -> session.cancel()
                            3 -> session.trim(Trim.SOFT)
                            4 -> runBlocking { session.save() }
                            else -> session.usage()
                        }
                        answered.incrementAndGet()
                    } catch (failed: EdgeException) {
                        if (failed.status == Status.BUSY) busy.incrementAndGet() else throw failed
                    } catch (occupied: IllegalStateException) {
                    }
                }
            }
        }
        threads.forEach { it.join() }
        session.close()
    }
    println("busy=$busy ${answered.get() > 50}")
}

fun main(arguments: Array<String>) {
    val (path, folder) = arguments
    val model = EdgeModel.open(path)
    println("info=${model.info}")
    conversation(model, File(folder))
    interruptions(model)
    prompts(model)
    storm(model)
    model.close()
    try {
        EdgeModel.open("$folder/state")
    } catch (failed: EdgeException) {
        println("no model=${failed.status}")
    }
}
