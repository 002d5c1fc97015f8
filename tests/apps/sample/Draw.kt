/** The sample's chat with a model, and its screen, drawn by Compose for desktops. */
package com.example.chat

import androidx.compose.material3.MaterialTheme
import androidx.compose.runtime.mutableStateOf
import androidx.compose.ui.ImageComposeScene
import androidx.compose.ui.unit.Density
import edge.runtime.EdgeModel
import edge.runtime.EdgeOptions
import edge.runtime.EdgeSession
import java.io.File
import kotlinx.coroutines.CoroutineScope
import kotlinx.coroutines.Dispatchers
import kotlinx.coroutines.ExperimentalCoroutinesApi
import kotlinx.coroutines.SupervisorJob
import kotlinx.coroutines.delay
import kotlinx.coroutines.flow.Flow
import kotlinx.coroutines.flow.emptyFlow
import kotlinx.coroutines.flow.first
import kotlinx.coroutines.runBlocking
import org.jetbrains.skia.EncodedImageFormat

private class Desktop(private val model: EdgeModel) : Device {
    lateinit var session: EdgeSession

    override fun begin(options: EdgeOptions): EdgeSession =
        model.session(options.copy(maxTokens = 200, temperature = 0.0, ignoreEos = false)).also { session = it }

    override fun find(name: String): String? = null

    override fun setTimer(timer: Timer) = println("timer=${timer.minutes in 1..600}")

    override fun listen(rate: Int): Flow<ShortArray> = emptyFlow()

    override fun close() = Unit
}

@OptIn(ExperimentalCoroutinesApi::class)
private val oneThread = Dispatchers.Default.limitedParallelism(1)

private fun begin(device: Desktop, file: File) = Chat(device, file, CoroutineScope(SupervisorJob() + oneThread))

private suspend fun Chat.settled() = screen.first { it.phase in setOf(Screen.Phase.READY, Screen.Phase.FAILED) }

/** Arguments: model.edge, a folder, and whether to draw. */
fun main(arguments: Array<String>) = runBlocking {
    val model = EdgeModel.open(arguments[0])
    val file = File(arguments[1], "conversation")
    val device = Desktop(model)
    val chat = begin(device, file)
    println("modes=${chat.settled().modes}")
    for ((question, mode) in listOf(
        "Why is the sky blue?" to Mode.CHAT,
        "Wake me in 20 minutes." to Mode.TIMER,
        "A table for four on Friday, for Ada, outside." to Mode.FORM,
    )) {
        chat.ask(question, mode)
        chat.screen.first { it.phase == Screen.Phase.ANSWERING }
        val screen = chat.settled()
        println("said=${screen.turns.map { it.by }} ${screen.turns.last().fields.keys} ${screen.turns.all { it.text.isNotEmpty() }}")
    }
    val before = device.session.usage().rows
    chat.ask("Wake me in an hour.", Mode.TIMER)
    while (device.session.usage().rows == before) delay(1)
    chat.cancel()
    chat.settled()
    println("stopped=${device.session.finish}")
    chat.ask("A table for two on Monday, for Bea, inside.", Mode.FORM)
    chat.screen.first { it.phase == Screen.Phase.ANSWERING }
    println("booked=${chat.settled().turns.last().fields.keys}")
    chat.keep().join()
    val said = chat.screen.value.turns
    val rows = chat.screen.value.status
    chat.close()
    val next = begin(Desktop(model), file)
    println("restored=${next.settled().turns == said} ${rows.isNotEmpty()}")
    if (arguments[2] == "draw") draw(next.screen.value.copy(status = rows), File(arguments[1], "chat.png"))
    next.close()
    for (damaged in listOf("2147483647\n[]", "-9\n[]", "2\n{}", "3\n[]")) {
        file.writeText(damaged)
        val empty = begin(Desktop(model), file)
        println("damaged=${empty.settled().phase} ${empty.screen.value.turns}")
        empty.close()
    }
    model.close()
}

private fun draw(screen: Screen, file: File) {
    val nothing = Actions({ _, _ -> }, {}, {}, {})
    val shown = mutableStateOf(screen)
    val scene = ImageComposeScene(1080, 1920, Density(2.6f)) { MaterialTheme { ChatScreen(shown.value, nothing) } }
    for (frame in 0L..5L) scene.render(frame * 100_000_000L).close() // effects run, and the list scrolls
    val picture = scene.render(600_000_000L)
    file.writeBytes(checkNotNull(picture.encodeToData(EncodedImageFormat.PNG)).bytes)
    scene.close()
}
