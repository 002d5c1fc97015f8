package com.example.chat

import android.annotation.SuppressLint
import android.content.Context
import android.content.Intent
import android.graphics.Bitmap
import android.media.AudioFormat
import android.media.AudioRecord
import android.media.MediaRecorder
import android.provider.AlarmClock
import edge.runtime.AndroidSensors
import edge.runtime.EdgeModel
import edge.runtime.EdgeOptions
import edge.runtime.EdgeSession
import edge.runtime.assetPath
import edge.runtime.fromAssets
import edge.runtime.trimInBackground
import java.io.Closeable
import kotlinx.coroutines.Dispatchers
import kotlinx.coroutines.currentCoroutineContext
import kotlinx.coroutines.flow.Flow
import kotlinx.coroutines.flow.flow
import kotlinx.coroutines.flow.flowOn
import kotlinx.coroutines.isActive

/** The phone, with the model among the app's assets. */
class Phone(context: Context) : Device {
    private val application = context.applicationContext
    private var trimming: Closeable? = null

    override fun begin(options: EdgeOptions): EdgeSession =
        model(application).session(options, AndroidSensors(application)).also {
            trimming = it.trimInBackground(application)
        }

    override fun close() {
        trimming?.close()
    }

    override fun find(name: String): String? =
        if (name in application.assets.list("").orEmpty()) EdgeModel.assetPath(application, name) else null

    /** By the phone's own clock, which goes on without this app. */
    override fun setTimer(timer: Timer) {
        val intent = Intent(AlarmClock.ACTION_SET_TIMER)
            .putExtra(AlarmClock.EXTRA_LENGTH, timer.minutes * 60)
            .putExtra(AlarmClock.EXTRA_SKIP_UI, true)
            .addFlags(Intent.FLAG_ACTIVITY_NEW_TASK)
        if (intent.resolveActivity(application.packageManager) != null) application.startActivity(intent)
    }

    @SuppressLint("MissingPermission") // the activity has asked for it
    override fun listen(rate: Int): Flow<ShortArray> = flow {
        val bytes = AudioRecord.getMinBufferSize(rate, CHANNEL, ENCODING).coerceAtLeast(2 * rate)
        val microphone = AudioRecord(MediaRecorder.AudioSource.VOICE_RECOGNITION, rate, CHANNEL, ENCODING, bytes)
        try {
            microphone.startRecording()
            val samples = ShortArray(rate / 5)
            while (currentCoroutineContext().isActive) {
                val count = microphone.read(samples, 0, samples.size)
                if (count <= 0) return@flow
                emit(samples.copyOf(count))
            }
        } finally {
            microphone.release()
        }
    }.flowOn(Dispatchers.IO)

    companion object {
        private const val CHANNEL = AudioFormat.CHANNEL_IN_MONO
        private const val ENCODING = AudioFormat.ENCODING_PCM_16BIT
        private var opened: EdgeModel? = null // once for the process

        @Synchronized
        private fun model(context: Context) = opened ?: EdgeModel.fromAssets(context).also { opened = it }

        /** A bitmap's colors. */
        fun pictureOf(bitmap: Bitmap): Picture {
            val colors = IntArray(bitmap.width * bitmap.height)
            bitmap.getPixels(colors, 0, bitmap.width, 0, 0, bitmap.width, bitmap.height)
            return Picture(colors, bitmap.width, bitmap.height)
        }
    }
}
