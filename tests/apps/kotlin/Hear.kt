/* A transcript of an exported model that hears. Prints a line for each segment. */
package edge.runtime

import java.io.File
import kotlinx.coroutines.flow.asFlow
import kotlinx.coroutines.flow.collect
import kotlinx.coroutines.flow.first
import kotlinx.coroutines.runBlocking

fun main(arguments: Array<String>): Unit = runBlocking {
    val (path, ears, sound, piece) = arguments
    val bytes = struct(4).apply { limit(4) }
    val data = java.nio.ByteBuffer.wrap(File(sound).readBytes()).order(bytes.order()).asShortBuffer()
    val samples = ShortArray(data.remaining()).also { data.get(it) }
    val hearing = Hearing(rate = 16000, language = "de", prompt = "a b", temperature = 0.0, everything = true, words = true)
    EdgeModel.open(path).use { model ->
        val session = model.session()
        val parts = samples.asList().chunked(piece.toInt()).map { it.toShortArray() }
        session.transcribe(parts.asFlow(), hearing, ears).collect { each ->
            println("segment=${each.id} ${each.start} ${each.end} ${each.language} ${each.text}")
            println("words=${each.words}")
        }
        println("finish=${session.finish}")
        try {
            session.append(Role.USER, "Hello")
        } catch (failed: EdgeException) {
            println("answer=${failed.message}")
        }
        try {
            session.transcribe(parts.asFlow(), Hearing(), ears).first()
        } catch (failed: EdgeException) {
            println("rate=${failed.message}")
        }
    }
}
